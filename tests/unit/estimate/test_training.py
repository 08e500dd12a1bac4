"""The moments of a training step of a small decoder, each of which may be its peak, in bytes that are counted by hand.

There are ten tokens. What a layer saves, and what its backward takes at most beside, is counted in test_layers.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from memprof.estimate import training
from memprof.estimate.geometry import DecoderGeometry
from memprof.estimate.layers import DecoderLayer, record_layer
from memprof.estimate.peaks import list_moments
from memprof.estimate.projections import LayerSettings
from memprof.estimate.ranks import SINGLE_GPU, Rank
from memprof.estimate.state import build_settings
from memprof.estimate.tape import Tape
from tests.unit.estimate.tiny import COUNT, TINY, plan, run, tiny_model

LAYER = 49_152 + 128
TABLE = 64_000
WORKSPACE = 2 * 8_519_680
HIDDEN = 10 * 64 * 2
OTHER = 2 * 10 * 16 * 2 + 16 * 10  # cosines and sines; token ids and labels
LOGITS = 10 * 1000 * 2
# The norm's input in float32, statistics, before its weight, and its result for the head.
FINAL_NORM = 10 * (256 + 4 + 128 + 128)


def moments(
    method: str, column: str = "bfloat16", rank: Rank = SINGLE_GPU, geometry: DecoderGeometry = TINY, **more: Any
) -> dict[str, dict[str, int]]:
    """Return the terms of each moment that are not zero, but for workspaces, by the moment's name; of two
    moments of one name the first."""
    found: dict[str, dict[str, int]] = {}
    for moment in list_moments(tiny_model(geometry), plan(method, column, **more), 1, 10, rank):
        terms = {name: size for name, size in moment.terms.items() if size}
        assert terms.pop("library workspace") == WORKSPACE
        found.setdefault(moment.name, terms)
    return found


def layer(setting: LayerSettings) -> tuple[int, int, int, int]:
    """Return what a layer saves, and beside it the peaks of its forward and of its backward; and what is live of it."""
    tape = Tape(setting.tokens, training=True)
    hidden = tape.add_input(64, setting.stream_itemsize, needs_grad=True, name="hidden states")
    output = DecoderLayer(tape, setting).record(hidden)
    live = tape.live - output.num_bytes
    _, forward, _, backward = run(tape, output)
    return record_layer(setting)[1], forward - live, backward - live, live


def settings(method: str, column: str = "bfloat16", geometry: DecoderGeometry = TINY, **more: Any) -> LayerSettings:
    return build_settings(geometry, plan(method, column, **more), 1, 10)


STATE = {"parameters": 2 * COUNT, "optimizer state": 4 * COUNT}


def test_full_training() -> None:
    saved, _, backward, _ = layer(settings("full"))
    head = 2 * TABLE
    kept = 3 * saved + FINAL_NORM + OTHER
    assert moments("full") == {
        # The hidden states before and after the final norm; logits, in float32, and their log-softmax.
        "loss, forward": {**STATE, "activations": kept + 2 * HIDDEN, "logits and loss": LOGITS + 2 * 2 * LOGITS},
        # ... and its gradient, and that of the float32 logits.
        "loss, backward": {**STATE, "activations": kept, "logits and loss": LOGITS + 3 * 2 * LOGITS},
        "head, backward": {
            **STATE, "activations": kept + HIDDEN, "gradients": head, "logits and loss": LOGITS + LOGITS,
        },
        "last layer, backward": {
            **STATE, "activations": 3 * saved + OTHER + backward, "gradients": head, "logits and loss": LOGITS,
        },
        "first layer, backward": {
            **STATE, "activations": saved + OTHER + backward, "gradients": head + 2 * 2 * LAYER,
            "logits and loss": LOGITS,
        },
        "embedding, backward": {
            **STATE, "activations": OTHER + HIDDEN, "gradients": 2 * COUNT, "logits and loss": LOGITS,
        },
        "optimizer step": {**STATE, "gradients": 2 * COUNT, "temporaries": 2 * COUNT},
    }  # fmt: skip


def test_float32_logits_need_no_copy() -> None:
    found = moments("full", "float32")
    assert [found[f"loss, {way}"]["logits and loss"] for way in ("forward", "backward")] == [4 * LOGITS, 8 * LOGITS]


def test_a_layer_norm_saves_its_input() -> None:
    geometry = dataclasses.replace(TINY, norm="layer")
    saved = layer(settings("full", geometry=geometry))[0]
    assert (
        moments("full", geometry=geometry)["loss, backward"]["activations"] == 3 * saved + 10 * (128 + 8 + 128) + OTHER
    )


def test_a_tied_head_adds_its_gradient_to_the_embeddings() -> None:
    found = moments("full", geometry=dataclasses.replace(TINY, tied=True))
    assert found["embedding, backward"]["gradients"] == 2 * (COUNT - TABLE) + 2 * 2 * TABLE
    # That of a chunked loss is added in place.
    found = moments("full", geometry=dataclasses.replace(TINY, tied=True), chunked_loss=True)
    assert found["embedding, backward"]["gradients"] == 2 * (COUNT - TABLE) + 2 * TABLE
    sharded = {
        chunked_loss: moments(
            "full", rank=Rank(4, 4, 4, replicas=4, gathers=True), geometry=dataclasses.replace(TINY, tied=True),
            chunked_loss=chunked_loss,
        )["embedding, backward"]["gradients"]
        for chunked_loss in (False, True)
    }  # fmt: skip
    assert sharded[False] - sharded[True] == 2 * TABLE


def test_capped_logits_are_there_twice() -> None:
    found = moments("full", geometry=dataclasses.replace(TINY, has_softcap=True))
    assert [found[f"{name}ward"]["logits and loss"] for name in ("loss, for", "loss, back", "head, back")] == [
        6 * LOGITS, 8 * LOGITS, 3 * LOGITS,
    ]  # fmt: skip


def test_checkpointing_keeps_a_layers_input_and_computes_one_again() -> None:
    _, forward, backward, live = layer(settings("full"))
    found = moments("full-checkpointing")
    again = live + max(forward, backward)
    assert found["loss, backward"]["activations"] == 3 * HIDDEN + FINAL_NORM + OTHER
    assert found["last layer, backward"]["activations"] == 3 * HIDDEN + OTHER + again
    assert found["first layer, backward"]["activations"] == HIDDEN + OTHER + again


def test_checkpointing_does_not_drop_the_inputs_of_matrices_in_int8() -> None:
    int4, int8 = (moments("lora-checkpointing", column)["loss, backward"]["activations"] for column in ("int4", "int8"))
    # Of each layer: two norms' results and the product of gate and up in float32, and attention's result in bfloat16.
    assert int8 - int4 == 3 * 10 * (2 * 256 + 768 + 128)


def test_a_chunked_loss_holds_autocasts_copy_of_the_head() -> None:
    found = moments("lora-checkpointing", "int4", chunked_loss=True)
    assert found["last layer, backward"]["logits and loss"] == 2 * TABLE
    assert "logits and loss" not in moments("full", chunked_loss=True)["last layer, backward"]


def test_autocast_casts_the_weights_of_each_layer_and_of_the_head() -> None:
    """float32 between layers; logits in half precision."""
    saved, forward, backward, live = layer(settings("mixed"))
    cast, head, hidden, other = 2 * 49_152, 2 * TABLE, 2 * HIDDEN, OTHER + 2 * 10 * 16 * 2
    found = moments("mixed")
    # The norm's input is saved as it is, and its result is cast for the head.
    kept = 3 * (saved + cast) + hidden + 10 * (4 + 256 + 128) + other
    assert {name: terms["activations"] for name, terms in found.items() if "activations" in terms} == {
        "loss, forward": kept + 2 * hidden,
        "loss, backward": kept,
        "head, backward": kept + hidden,
        "last layer, backward": 3 * (saved + cast) + other + backward,
        "first layer, backward": saved + cast + other + backward,
        "embedding, backward": other + hidden,
    }
    assert [found[f"{name}ward"]["logits and loss"] for name in ("loss, for", "loss, back", "head, back")] == [
        5 * LOGITS + head, 7 * LOGITS + head, 2 * LOGITS + head + head,
    ]  # fmt: skip
    assert found["head, backward"]["gradients"] == 4 * TABLE
    assert found["first layer, backward"]["gradients"] == 4 * TABLE + 2 * 4 * LAYER
    checkpointed = moments("mixed-checkpointing")
    # The casts of all layers are there until the forward ends.
    kept = 3 * hidden + hidden + 10 * (4 + 256 + 128) + other
    assert checkpointed["loss, forward"]["activations"] == kept + 3 * cast + 2 * hidden
    assert checkpointed["loss, backward"]["activations"] == kept
    assert checkpointed["last layer, backward"]["activations"] == 3 * hidden + other + live + cast + max(
        forward, backward
    )


def test_an_adapter_has_no_gradients_but_its_own() -> None:
    """Those come in the first layer's backward at the latest, and are counted at the step."""
    setting = settings("lora")
    saved, _, backward, _ = layer(setting)
    first = record_layer(setting, hidden_needs_grad=False)[1]
    found = moments("lora")
    trained = 3 * 8 * (64 + 64 + 64 + 32)
    assert first < saved
    # The norm's result is not saved for a frozen head.
    assert found["loss, backward"]["activations"] == 2 * saved + first + 10 * (256 + 4) + OTHER
    assert found["last layer, backward"]["activations"] == 2 * saved + first + OTHER + backward
    assert found["first layer, backward"]["activations"] == first + OTHER + backward
    assert "embedding, backward" not in found
    assert [name for name, terms in found.items() if "gradients" in terms] == ["optimizer step"]
    assert found["optimizer step"]["gradients"] == found["optimizer step"]["temporaries"] == 4 * trained
    assert found["head, backward"]["logits and loss"] == 2 * LOGITS


def test_layers_without_a_window_need_no_mask() -> None:
    """Of four layers every second has no window; ten tokens exceed the others'."""
    geometry = dataclasses.replace(TINY, family="gemma3_text", layers=4, window=10, global_interval=2)
    setting = settings("full", geometry=geometry)
    local, whole = (
        layer(setting)[0],
        layer(dataclasses.replace(setting, geometry=dataclasses.replace(geometry, window=0)))[0],
    )
    assert local > whole
    found = moments("full", geometry=geometry)
    other = 2 * 2 * 10 * 16 * 2 + 2 * 100 + 160
    assert found["loss, backward"]["activations"] == 2 * local + 2 * whole + FINAL_NORM + other
    _, _, backward, _ = layer(setting)
    assert found["first layer, backward"]["activations"] == local + other + backward


@pytest.mark.parametrize(
    ("method", "chunk_bytes", "rows", "first_gradients", "second_rows", "second_gradients"),
    [
        # In one chunk: the logits and their gradient in float32; that in half precision, and the head's.
        ("full", 10 * 10_000, 10, 0, 10, 2 * TABLE),
        # In two the head's is summed in float32, and cast.
        ("full", 10 * 10_000 - 1, 9, 4 * TABLE, 0, 4 * TABLE + 2 * TABLE),
        ("lora", 10 * 10_000 - 1, 9, 0, 9, 0),
    ],
)
def test_a_chunked_loss_has_its_logits_in_pieces(
    monkeypatch, method, chunk_bytes, rows, first_gradients, second_rows, second_gradients
) -> None:
    """A token has ten bytes for each word: in half precision, its copy in float32, and one more in float32."""
    monkeypatch.setattr(training, "CHUNK_BYTES", chunk_bytes)
    first, second, *others = list_moments(tiny_model(), plan(method, chunked_loss=True), 1, 10)
    assert first.name == second.name == "loss, backward, in chunks"
    assert first.terms["activations"] == second.terms["activations"]
    if method == "full":
        assert first.terms["activations"] == 3 * layer(settings("full"))[0] + FINAL_NORM + OTHER + HIDDEN
    for moment, logits, gradients in (
        (first, 1000 * 6 * rows, first_gradients), (second, 1000 * 2 * second_rows, second_gradients),
    ):  # fmt: skip
        assert (moment.terms["logits and loss"], moment.terms["gradients"]) == (logits, gradients)
    assert not any(moment.terms["logits and loss"] for moment in others)


def test_chunks_of_float32_logits_need_no_copy(monkeypatch) -> None:
    monkeypatch.setattr(training, "CHUNK_BYTES", 8 * 10_000)
    first, _, *_ = list_moments(tiny_model(), plan("full", "float32", chunked_loss=True), 1, 10)
    assert first.terms["logits and loss"] == 1000 * 8 * 10


@pytest.mark.parametrize(
    ("rank", "communication"),
    [
        # DistributedDataParallel has a copy of all gradients in its buckets; ZeRO two layers'.
        (Rank(replicas=4), 2 * COUNT),
        (Rank(state_shards=4, grad_shards=4, replicas=4), 2 * 2 * LAYER),
    ],
)
def test_ranks_that_reduce_gradients(rank: Rank, communication: int) -> None:
    found, alone = moments("full", rank=rank), moments("full")
    assert {terms["communication"] for terms in found.values()} == {communication}
    for name, terms in found.items():
        assert terms["optimizer state"] == 4 * COUNT // rank.state_shards
        assert terms.get("activations") == alone[name].get("activations")
    assert found["optimizer step"]["gradients"] == 2 * COUNT // rank.grad_shards
    assert found["optimizer step"]["temporaries"] == 2 * COUNT // rank.state_shards
    assert found["first layer, backward"]["gradients"] == 2 * 2 * LAYER // rank.grad_shards + 2 * TABLE


ROOT = 2 * TABLE + 64


def test_a_rank_of_fully_shard_gathers_layers() -> None:
    found = moments("full", rank=Rank(4, 4, 4, replicas=4, gathers=True))
    sizes = {
        name: (terms.get("unsharded parameters", 0), terms.get("communication", 0)) for name, terms in found.items()
    }
    assert sizes == {
        # The root's parameters until its backward has ended; the layer that computes, one fetched, one reduced.
        "loss, forward": (2 * ROOT, 0),
        "loss, backward": (2 * ROOT, 2 * LAYER),
        "head, backward": (2 * ROOT, 2 * LAYER),
        "last layer, backward": (2 * (ROOT + LAYER), 2 * LAYER),
        "last layer but one, backward": (2 * (ROOT + LAYER), 2 * 2 * LAYER),
        "second layer, backward": (2 * (ROOT + LAYER), 2 * 2 * LAYER),
        "first layer, backward": (2 * (ROOT + LAYER), 2 * LAYER),
        "embedding, backward": (2 * ROOT, 2 * LAYER),
        "reduction of the root": (0, 2 * ROOT),
        "optimizer step": (0, 0),
    }
    assert found["embedding, backward"]["gradients"] == (2 * COUNT - 2 * ROOT) // 4 + 2 * ROOT
    assert found["reduction of the root"]["gradients"] == 2 * COUNT // 4 + 2 * ROOT
    assert found["reduction of the root"]["activations"] == OTHER
    assert found["reduction of the root"]["logits and loss"] == LOGITS
    assert found["second layer, backward"]["gradients"] == 2 * LAYER // 4 + 2 * TABLE


def test_shards_are_fewer_than_ranks() -> None:
    """Two replicas of three shards."""
    found = moments("full", rank=Rank(3, 3, 3, replicas=6, gathers=True))
    step = found["optimizer step"]
    third = 2 * COUNT // 3
    assert step == {"parameters": third, "optimizer state": 2 * third, "gradients": third, "temporaries": third}
    # What is not at a moment has no row.
    first, *_ = list_moments(tiny_model(), plan("full"), 1, 10, Rank(3, 3, 3, replicas=6, gathers=True))
    assert "communication" not in first.terms and "unsharded parameters" in first.terms


def test_parameters_that_stay_gathered_are_those_of_the_layers_that_are_left() -> None:
    found = moments("full", rank=Rank(4, 4, 4, replicas=4, gathers=True, reshard=False))
    assert {name: found[name]["unsharded parameters"] for name in found if "layer" in name or "loss" in name} == {
        "loss, forward": 2 * (ROOT + 3 * LAYER), "loss, backward": 2 * (ROOT + 3 * LAYER),
        "last layer, backward": 2 * (ROOT + 3 * LAYER), "last layer but one, backward": 2 * (ROOT + 2 * LAYER),
        "second layer, backward": 2 * (ROOT + 2 * LAYER), "first layer, backward": 2 * (ROOT + LAYER),
    }  # fmt: skip
    assert "communication" not in found["last layer, backward"]
    assert found["first layer, backward"]["communication"] == 2 * LAYER


def test_mixed_precision_of_fully_shard_gathers_half_and_reduces_float32() -> None:
    rank = Rank(4, 4, 4, replicas=4, gathers=True)
    found, half = moments("mixed", rank=rank), moments("full", rank=rank)
    assert found["loss, backward"]["activations"] == half["loss, backward"]["activations"]
    assert found["last layer, backward"]["unsharded parameters"] == 2 * (ROOT + LAYER)
    # One layer fetched in half precision, another reduced in float32.
    assert found["second layer, backward"]["communication"] == 2 * LAYER + 4 * LAYER
    assert found["second layer, backward"]["gradients"] == 4 * LAYER // 4 + 2 * TABLE
    assert found["reduction of the root"]["communication"] == 4 * ROOT


def test_a_sequence_is_divided_among_ranks() -> None:
    """Ten tokens by four: three on the fullest."""
    found = moments("full", rank=Rank(context=2, ulysses=2))
    assert found["loss, backward"]["logits and loss"] == 7 * 3 * 1000 * 2
    saved = record_layer(dataclasses.replace(settings("full"), context_length=3, ulysses_ranks=2))[1]
    other = 2 * 3 * 16 * 2 + 16 * 3
    assert found["loss, backward"]["activations"] == 3 * saved + FINAL_NORM * 3 // 10 + other


def test_tensor_parallel_ranks_have_parts_and_a_whole_gradient_of_the_embedding() -> None:
    rank = Rank(tensor=2)
    found = moments("full", rank=rank)
    elements = 3 * (49_152 // 2 + 128) + 2 * TABLE // 2 + 64
    step = found["optimizer step"]
    assert (step["parameters"], step["optimizer state"], step["temporaries"]) == (
        2 * elements,
        4 * elements,
        2 * elements,
    )
    assert step["gradients"] == 2 * elements + 2 * TABLE // 2
    assert found["head, backward"]["gradients"] == 2 * TABLE // 2
    saved = record_layer(dataclasses.replace(settings("full"), geometry=rank.shard_geometry(TINY)))[1]
    assert found["loss, backward"]["activations"] == 3 * saved + FINAL_NORM + OTHER


def test_a_pipeline_keeps_micro_batches() -> None:
    """Three stages of a layer each; 1F1B of six micro-batches has three, two and one at once."""
    saved, _, backward, _ = layer(settings("full"))
    waiting = saved + HIDDEN + 16 * 10  # of a micro-batch on a stage without the head: what it saves, and its result
    for stage, in_flight in enumerate((3, 2, 1)):
        rank = Rank(stages=3, stage=stage, in_flight=in_flight, microbatches=6)
        all_moments = list_moments(tiny_model(), plan("full"), 1, 10, rank)
        names = [moment.name for moment in all_moments]
        assert names.count("last layer, backward") == 2
        assert ("loss, forward" in names, "embedding, backward" in names) == (stage == 2, stage == 0)
        first, later = (moment.terms for moment in all_moments if moment.name == "first layer, backward")
        # Of a middle stage two are sent, and of the others one.
        assert {moment.terms["communication"] for moment in all_moments} == {6 * HIDDEN * (2 if stage == 1 else 1)}
        elements = LAYER + (TABLE if stage == 0 else TABLE + 64 if stage == 2 else 0)
        assert first["parameters"] == 2 * elements
        assert first["gradients"] == (2 * TABLE if stage == 2 else 0) and later["gradients"] == 2 * elements
        if stage < 2:
            assert first["activations"] == saved + OTHER + backward + (in_flight - 1) * waiting
            assert later["activations"] == first["activations"]
            assert "logits and loss" not in {name for name, size in first.items() if size}
        else:
            assert first["activations"] == saved + OTHER + backward
            later_loss = [moment.terms["gradients"] for moment in all_moments if moment.name == "loss, backward"]
            assert later_loss == [0, 2 * elements]
    # All at once, of which one is gone when there are gradients.
    rank = Rank(stages=3, stage=2, in_flight=6, microbatches=6)
    first, later = (
        moment.terms["activations"]
        for moment in list_moments(tiny_model(), plan("full"), 1, 10, rank)
        if moment.name == "first layer, backward"
    )
    last = saved + 16 * 10 + FINAL_NORM + LOGITS + 2 * LOGITS
    assert (first, later) == (saved + OTHER + backward + 5 * last, saved + OTHER + backward + 4 * last)


def test_a_waiting_micro_batch_keeps_no_casts_of_weights() -> None:
    saved, _, backward, live = layer(settings("mixed"))
    _, forward, _, _ = layer(settings("mixed"))
    cast, hidden, other = 2 * 49_152, 2 * HIDDEN, OTHER + 2 * 10 * 16 * 2
    rank = Rank(stages=2, stage=0, in_flight=2, microbatches=4)
    first = {name: moments(name, rank=rank)["first layer, backward"] for name in ("mixed", "mixed-checkpointing")}
    # Two layers; 1F1B runs another forward before there are gradients.
    assert first["mixed"]["activations"] == saved + cast + other + backward + 2 * saved + hidden + 160
    again = live + cast + max(forward, backward)
    assert first["mixed-checkpointing"]["activations"] == hidden + other + again + 2 * hidden + hidden + 160
