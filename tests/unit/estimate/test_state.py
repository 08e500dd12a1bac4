"""Weights, gradients and optimizer state of a small decoder, in bytes that are counted by hand."""

from __future__ import annotations

import dataclasses

import pytest

from memprof.estimate.projections import LayerSettings
from memprof.estimate.state import StaticMemory, build_settings, compute_static_memory, sum_position_bytes
from tests.unit.estimate.tiny import COUNT, LINEAR, NORMS, TINY, plan, tiny_model

PLAIN = COUNT - LINEAR  # embedding, head and norms


def test_parameters_are_counted() -> None:
    assert TINY.num_parameters == COUNT == 275_904
    assert dataclasses.replace(TINY, tied=True).num_parameters == COUNT - 64_000
    assert dataclasses.replace(TINY, has_head_bias=True, num_positions=10).num_parameters == COUNT + 1000 + 640
    biased = dataclasses.replace(TINY, norm="layer", has_qkv_bias=True, has_o_bias=True, has_mlp_bias=True)
    assert biased.num_parameters == COUNT + NORMS + 3 * (64 + 32 + 32 + 64 + 192 + 192 + 64)
    for qk_norm, size in (("head", 2 * 16), ("hidden", 64 + 32)):
        assert dataclasses.replace(TINY, qk_norm=qk_norm).norm_parameters == NORMS + 3 * size


@pytest.mark.parametrize(
    ("column", "num_bytes"),
    [
        ("float32", 4 * COUNT),
        ("float16", 2 * COUNT),
        ("fp8", 2 * PLAIN + LINEAR + 4 * 9),  # a scale per 128 x 128
        # A group of 128 has a scale of two bytes and a zero; GPTQ has four bytes for each of a layer's 576 rows.
        ("gptq-int8", 2 * PLAIN + LINEAR + 1152 * 3 + 4 * 3 * 576),
        ("gptq-int4", 2 * PLAIN + LINEAR // 2 + 1152 * 5 // 2 + 4 * 3 * 576),
        ("awq-int4", 2 * PLAIN + LINEAR // 2 + 1152 * 5 // 2),
        ("int8", 2 * PLAIN + LINEAR + 4 * 3 * 640),  # a scale for each of a layer's 640 results
        # A byte per 64, of which 256 have four bytes (q and o 1, the MLP's 3 each); four blocks of 512 per matrix.
        ("int4", 2 * PLAIN + LINEAR // 2 + LINEAR // 64 + 3 * (1 + 1 + 3 * 3) + 3 * 7 * 4 * 512),
    ],
)
def test_weights(column: str, num_bytes: int) -> None:
    assert compute_static_memory(tiny_model(), plan("weights", column)) == StaticMemory(num_bytes, 0, 0, 0, 0)
    # Of a shape that was derived, weights are as many as were asked for.
    assert compute_static_memory(tiny_model(count=3 * COUNT), plan("inference", column)).parameters == 3 * num_bytes


@pytest.mark.parametrize(
    ("optimizer", "state", "temporaries"),
    [
        ("adamw", 2, 1),
        ("adam", 2, 1),
        ("sgd", 0, 0),
        ("sgd-momentum", 1, 0),
        ("adagrad", 1, 2),
        ("rmsprop", 1, 1),
        ("none", 0, 0),
        # Bytes over the four of a float32.
        ("adamw-8bit", (2 + 2 / 64) / 4, 0),
        ("torchao-adamw-8bit", (2 + 2 / 64) / 4, 0),
        ("torchao-adamw-4bit", (1 + 1 / 16) / 4, 0),
        ("paged-adamw-8bit", 0, 0),
    ],
)
def test_full_training(optimizer: str, state: float, temporaries: int) -> None:
    weights = 4 * COUNT
    expected = StaticMemory(weights, COUNT, weights, round(state * weights), temporaries * weights)
    assert compute_static_memory(tiny_model(), plan("full", "float32", optimizer=optimizer)) == expected
    fused = compute_static_memory(tiny_model(), plan("full", "float32", optimizer=optimizer, fused=True))
    assert fused == dataclasses.replace(expected, temporaries=0)
    assert compute_static_memory(tiny_model(), plan("mixed", optimizer=optimizer)) == expected


def test_weights_of_another_number_are_rounded() -> None:
    """Ten of so many, of a byte and a scale each: 17.80."""
    of_all = compute_static_memory(tiny_model(), plan("weights", "int8")).parameters
    assert 10 * of_all % COUNT > COUNT / 2
    assert compute_static_memory(tiny_model(count=10), plan("weights", "int8")).parameters == 10 * of_all // COUNT + 1


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [("adamw-8bit", 35), ("torchao-adamw-8bit", 35), ("torchao-adamw-4bit", 18), ("paged-adamw-8bit", 0)],
)
def test_bytes_of_quantized_state_are_rounded(optimizer: str, state: int) -> None:
    """17 times 2 + 2 x 4 / 256, or 1 + 2 x 4 / 128, bytes: 34.53, 18.06."""
    assert compute_static_memory(tiny_model(None, 17), plan("full", optimizer=optimizer)).optimizer == state


@pytest.mark.parametrize(("hidden", "is_float32"), [(64, True), (4095, True), (4096, False)])
def test_8_bit_adamw_keeps_the_state_of_small_tensors_in_float32(hidden: int, is_float32: bool) -> None:
    geometry = dataclasses.replace(TINY, hidden=hidden)
    count, norms = geometry.num_parameters, 7 * hidden
    state = 2 * count + 8 * count // 256 + 6 * norms * is_float32
    memory = compute_static_memory(tiny_model(geometry), plan("adamw-8bit"))
    assert memory == StaticMemory(2 * count, count, 2 * count, state, 0)
    without_shape = compute_static_memory(tiny_model(None, count), plan("adamw-8bit"))
    assert without_shape.optimizer == 2 * count + 8 * count // 256


def test_lora_trains_its_matrices_in_float32() -> None:
    trained = 3 * 5 * (64 + 64 + 64 + 32)  # q and v, of rank 5
    expected = StaticMemory(2 * COUNT + 4 * trained, trained, 4 * trained, 8 * trained, 4 * trained)
    assert compute_static_memory(tiny_model(), plan("lora", lora_rank=5)) == expected
    biased = dataclasses.replace(TINY, has_qkv_bias=True)
    assert compute_static_memory(tiny_model(biased), plan("lora", lora_rank=5)).num_trained == trained
    assert compute_static_memory(tiny_model(None), plan("lora")) == StaticMemory(2 * COUNT, 0, 0, 0, 0)
    down = compute_static_memory(tiny_model(), plan("lora", "int8", lora_rank=1, lora_targets="down_proj"))
    assert down.num_trained == 3 * (192 + 64)
    # What is not quantized is float32.
    assert down.parameters == 4 * PLAIN + LINEAR + 4 * 3 * 640 + 4 * down.num_trained


def test_settings_of_a_layer() -> None:
    qlora = build_settings(TINY, plan("lora", "int8", lora_rank=5, lora_targets="k_proj", padded=True), 2, 7)
    assert qlora == LayerSettings(
        TINY, 2, 7, 4, training=True, trains_weights=False, amp=True, quantize="int8", lora_rank=5,
        lora_targets=("k",), cache=False, padded=True,
    )  # fmt: skip
    assert build_settings(TINY, plan("full", "float32"), 2, 7) == LayerSettings(TINY, 2, 7, 4)
    inference = LayerSettings(TINY, 2, 7, 2, training=False, trains_weights=False, quantize="fp8", cache=True)
    assert build_settings(TINY, plan("inference", "fp8"), 2, 7) == inference


@pytest.mark.parametrize(
    ("changes", "itemsize", "compute", "stream"),
    [
        ({}, 2, 2, 2),
        ({}, 4, 4, 4),
        ({"amp": True}, 4, 2, 4),
        ({"quantize": "int8", "lora_rank": 8}, 2, 2, 2),
    ],
)
def test_items_in_products_and_between_layers(changes: dict, itemsize: int, compute: int, stream: int) -> None:
    setting = LayerSettings(TINY, 1, 1, itemsize, **changes)
    assert (setting.compute_itemsize, setting.stream_itemsize) == (compute, stream)


@pytest.mark.parametrize(
    ("family", "changes", "rotary", "masks"),
    [
        ("llama", {}, 1, 0),
        ("llama", {"rotary_fraction": 0.5}, 0.5, 0),
        ("llama", {"window": 11}, 1, 0),
        ("llama", {"window": 10}, 1, 1),
        ("gemma2", {"window": 10}, 1, 2),
        ("gemma3_text", {"window": 10}, 2, 2),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_positions_and_masks(family: str, changes: dict, rotary: float, masks: int, padded: bool) -> None:
    """Cosines and sines in the dtype of the hidden states, and a byte for each pair of tokens that a mask has."""
    setting = LayerSettings(dataclasses.replace(TINY, family=family, **changes), 3, 10, 2, padded=padded)
    if padded:
        masks = 3 * (2 if "gemma" in family else 1)
    assert sum_position_bytes(setting) == rotary * 2 * 10 * 16 * 2 + masks * 100
