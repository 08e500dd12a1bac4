"""A model spread over ranks by torch's own functions: one rank of each kind, and what it has."""

from __future__ import annotations

import json

import pytest

import memprof
from memprof.errors import UsageError
from memprof.spec import TargetSpec
from tests.lanes import by_day

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 2048, "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
# Parameters: queries and outputs, keys and values, the feed-forward, two norms.
LAYER = 2 * (256 * 256 + 256 * 128) + 3 * 256 * 512 + 2 * 256
EMBEDDING = 2048 * 256
WHOLE = 4 * LAYER + 2 * EMBEDDING + 256


@pytest.fixture
def profile(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def run(parallel: str | None, gpus: int = 1, **more):
        given = {"model": str(tmp_path), "context_length": 512, "batch_size": 2, **more}
        return memprof.profile(TargetSpec(gpus=gpus, parallel=parallel, **given))[1]

    return run


def state(document):
    found = document.model_state
    return found.parameters_bytes, found.gradients_bytes, found.optimizer_state_bytes


@pytest.mark.parametrize(
    "plan", by_day(["fsdp", "fsdp:shard_grad_op", "hsdp:2x2", "tp=2,fsdp=2"], "hsdp:2x2", "tp=2,fsdp=2")
)
def test_shards_add_up_to_the_whole(profile, plan):
    """Of parameters, gradients and optimizer state: bfloat16, and AdamW's two moments in it."""
    document = profile(plan, 4)
    shards = 2 if plan == "hsdp:2x2" else 4
    twice = 2 * (4 * 2 + 1) * 256 if plan.startswith("tp") else 0  # bytes of norms, which tp leaves whole
    parameters, gradients, moments = state(document)
    assert parameters * shards == 2 * WHOLE + twice
    assert (gradients, moments) == (parameters, 2 * parameters)
    assert [(row.rank, row.alike, row.fits) for row in document.ranks] == [(0, (0, 3), True)]


def test_replicas_are_whole(profile):
    document = profile("ddp", 2)
    assert state(document)[0] == 2 * WHOLE
    assert "communication" in document.peak.categories


def test_a_rank_of_a_pipeline_has_its_stage(profile):
    document = profile("pp=4", 4)
    assert [row.alike for row in document.ranks] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert not any(row.like for row in document.ranks)
    held = [row.categories["parameters"] for row in document.ranks]
    assert held == pytest.approx(
        [2 * (LAYER + EMBEDDING), 2 * LAYER, 2 * LAYER, 2 * (LAYER + EMBEDDING + 256)], abs=16 * 512
    )
    # The first has as many micro-batches in flight as there are stages, the last has one.
    activations = [row.categories["activations"] for row in document.ranks]
    assert activations[0] > activations[1] > activations[2] > activations[3] / 2
    assert {stage.name for stage in document.stages} >= {"inputs", "backward", "optimizer step"}


@pytest.mark.nightly
def test_three_directions_at_once(profile):
    """A layer a stage, whose matrices two ranks share, and of which each of two has half: each kind of rank runs."""
    document = profile("tp=2,pp=4,fsdp=2", 16)
    assert [row.alike for row in document.ranks] == [(at, at + 3) for at in (0, 4, 8, 12)]
    held = [4 * row.categories["parameters"] for row in document.ranks]  # norms are whole on two ranks
    expected = [2 * (LAYER + EMBEDDING), 2 * LAYER, 2 * LAYER, 2 * (LAYER + EMBEDDING + 256)]
    assert held == pytest.approx(expected, rel=0.01)


@pytest.mark.nightly
def test_gpipe_keeps_all_micro_batches(profile):
    first, second = (profile(f"pp=2:{kind}:microbatches=8", 2, rank=0) for kind in ("1f1b", "gpipe"))
    assert second.peak.categories["activations"] > 2.5 * first.peak.categories["activations"]


@pytest.mark.parametrize("plan", by_day(["cp=2", "ulysses=2"], "cp=2"))
def test_a_part_of_the_sequence_has_half_of_the_logits(profile, plan):
    whole, part = profile(None), profile(plan, 2, rank=1)
    logits = [found.peak.categories["logits and loss"] for found in (whole, part)]
    assert logits[1] == pytest.approx(logits[0] / 2, rel=0.01)
    assert not any("bool" in tensor.dtype for tensor in part.peak.tensors)  # no mask
    layers = [
        sum(stage.delta_bytes for stage in found.stages if "layer" in stage.name and stage.step == 2)
        for found in (whole, part)
    ]
    assert layers[1] == pytest.approx(layers[0] / 2, rel=0.1)


def test_what_is_not_divided(profile):
    with pytest.raises(UsageError, match="510 tokens cannot be divided by 4") as error:
        profile("ulysses=2", 2, rank=0, context_length=510)
    assert error.value.hint == "--context-length 508"


@pytest.mark.nightly
def test_fixes_are_applied_to_what_is_sharded(profile):
    plain, chunked = profile("fsdp", 2), profile("fsdp", 2, fixes=("chunked-loss", "activation-checkpointing"))
    assert chunked.peak.categories["logits and loss"] < 0.2 * plain.peak.categories["logits and loss"]
    assert chunked.peak.categories["activations"] < 0.6 * plain.peak.categories["activations"]
    assert state(chunked) == state(plain)
    with pytest.raises(UsageError, match="cpu-offload-weights beside --parallel"):
        profile("fsdp", 2, fixes=("cpu-offload-weights",))


def test_autocast_is_fully_shards_own(profile):
    document = profile("fsdp", 2, amp="bfloat16")
    assert state(document) == (2 * WHOLE, 2 * WHOLE, 4 * WHOLE)
