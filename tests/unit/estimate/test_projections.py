"""A linear layer of a small decoder, forward and backward, in bytes that are counted by hand.

Inputs have three tokens of 64 elements, 384 bytes in half precision, and are not counted; a weight of 64 x 64 has
8,192 bytes in half precision.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from memprof.estimate.geometry import DecoderGeometry
from memprof.estimate.projections import LayerSettings, Projections
from memprof.estimate.tape import Tape, Tensor
from tests.unit.estimate.tiny import TINY, run


def record(
    matrix: str,
    itemsize: int,
    tokens: int = 3,
    geometry: DecoderGeometry = TINY,
    needs_grad: bool = True,
    **setting: Any,
) -> tuple[Tape, Tensor]:
    """Record the layer on an input of so many bytes an element."""
    layer_setting = LayerSettings(geometry, 1, tokens, **{"itemsize": itemsize, **setting})
    tape = Tape(tokens, layer_setting.training)
    width = geometry.list_matrices()[matrix][0]
    x = tape.add_input(width, itemsize, needs_grad=needs_grad, name="x")
    output = Projections(tape, layer_setting).record_linear(x, matrix, "query")
    assert (output.itemsize, output.name) == (
        2 if layer_setting.amp and not setting.get("quantize") else itemsize,
        "query",
    )
    return tape, output


FROZEN = {"trains_weights": False}
QLORA = {"amp": True, "trains_weights": False}


@pytest.mark.parametrize(
    ("matrix", "itemsize", "setting", "saved", "peak", "grads", "backward"),
    [
        # The output; then its gradient, that of the input and that of the weight.
        ("q", 2, {}, 0, 384, 8192, 384 + 384 + 8192),
        ("q", 2, FROZEN, 0, 384, 0, 384 + 384),
        # A cast of the input is saved. Its gradient and the weight's are in half precision first, the latter made
        # float32 while the former waits.
        ("q", 4, {"amp": True}, 384, 384 + 384, 2 * 8192, 3 * 384 + 8192 + 2 * 8192),
        ("q", 4, {"amp": True, **FROZEN}, 0, 384 + 384, 0, 384 + 768),
        # The weight is dequantized beside the cast input: first with the product, then for its gradient.
        ("q", 4, {"quantize": "int4", **QLORA}, 0, 384 + 8192 + 384, 0, 2 * 384 + 8192),
        # bitsandbytes: float16 and int8 of the input, both twice; the input in int8, the product in int32, float16 and
        # float32. The weight in float32 for the gradient of the input, which is there already.
        ("q", 4, {"quantize": "int8", **QLORA}, 0, 3 * (64 + 64 * (4 + 2 + 4)), 0, 2 * 768 + 16_384),
        ("down", 4, {"quantize": "int8", **QLORA}, 0, 3 * 192 * 6, 0, 768 + 2304 + 4 * 192 * 64),
        ("q", 2, {"quantize": "int4", "training": False}, 0, 8192 + 384, 0, None),
        ("q", 2, {"quantize": "fp8", "training": False}, 0, 384 + 3 * 64, 0, None),
        ("q", 2, {"quantize": "awq-int4", "training": False}, 0, 384, 0, None),
        # From 64 to 192 elements and back: the input is quantized, and the product larger or smaller.
        ("gate", 2, {"quantize": "fp8", "training": False}, 0, 3 * 384 + 3 * 64, 0, None),
        ("down", 2, {"quantize": "fp8", "training": False}, 0, 384 + 3 * 192, 0, None),
        ("gate", 2, {"quantize": "gptq-int8", "training": False}, 0, 3 * 384, 0, None),
        ("down", 4, {"quantize": "int4", **QLORA}, 0, 1152 + 24_576 + 768, 0, 384 + 1152 + 24_576),
    ],
)  # fmt: skip
def test_a_linear_layer(matrix, itemsize, setting, saved, peak, grads, backward) -> None:
    tape, output = record(matrix, itemsize, **setting)
    if backward is None:
        assert (tape.saved_bytes, tape.peak, tape.live) == (saved, peak, output.num_bytes)
    else:
        assert run(tape, output) == (saved, peak, grads, backward)


def test_a_weight_is_trained_whether_or_not_its_input_is() -> None:
    assert run(*record("q", 2, needs_grad=False))[2] == 8192


def test_a_bias_is_trained_too() -> None:
    tape, output = record("q", 2, geometry=dataclasses.replace(TINY, has_qkv_bias=True))
    assert run(tape, output)[2] == 8192 + 2 * 64


def test_scales_are_in_float32_while_they_are_more_than_the_product() -> None:
    """A scale for each 64 weights: 256 bytes, and 128 of the product of one token."""
    tape, _ = record("q", 4, tokens=1, quantize="int4", **QLORA)
    assert tape.peak == 128 + 8192 + 256


@pytest.mark.parametrize("quantize", ["awq-int4", "gptq-int8"])
def test_long_inputs_are_multiplied_with_a_dequantized_weight(quantize: str) -> None:
    peaks = [record("gate", 2, tokens=tokens, quantize=quantize, training=False)[0].peak for tokens in (1023, 1024)]
    assert peaks == [384 * 1023, 384 * 1024 + 2 * 64 * 192]


LORA = {"lora_rank": 5, "lora_targets": ("q",), "trains_weights": False}


@pytest.mark.parametrize(
    ("itemsize", "setting", "saved", "peak", "backward"),
    [
        # In float32: the input's cast, 5 elements, the result, scaled, and the sum with what the layer made. Backward,
        # the gradients of that sum, of what was scaled, and of the layer's result in half precision.
        (2, LORA, 768 + 60, 384 + 768 + 60 + 2 * 768, 768 + 60 + 768 + 768 + 384),
        # Under autocast in half precision. Last are the input's gradients from the layer and from the adapter.
        (4, {**LORA, "amp": True}, 384 + 30, 384 + 384 + 30 + 2 * 384, 768 + 768 + 384),
    ],
)
def test_an_adapter_in_float32_and_under_autocast(itemsize, setting, saved, peak, backward) -> None:
    tape, output = record("q", itemsize, **setting)
    assert tape.live == saved + output.num_bytes
    assert run(tape, output) == (saved, peak, 0, backward)
    # The input need not have a gradient.
    assert record("q", itemsize, needs_grad=False, **setting)[0].saved_bytes == saved


def test_an_adapter_is_of_its_targets_and_keeps_their_input_alone() -> None:
    tape, output = record("k", 2, **LORA)
    assert (tape.saved_bytes, tape.live) == (0, output.num_bytes)
    tape, output = record("q", 4, **LORA)  # the input is float32 itself
    assert tape.saved_bytes == 60


@pytest.mark.parametrize(
    ("window", "padded", "context", "has_mask"),
    [(0, False, 9, False), (0, True, 9, True), (9, False, 8, False), (9, False, 9, True)],
)
def test_a_mask_hides_padding_or_what_is_beyond_the_window(window, padded, context, has_mask) -> None:
    geometry = dataclasses.replace(TINY, window=window)
    assert LayerSettings(geometry, 2, context, 2, padded=padded).has_mask == has_mask
