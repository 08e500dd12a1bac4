"""What the parts of a small decoder layer save and take, forward and backward, in bytes that are counted by hand.

Sizes are those of one token unless it says otherwise: 64 elements are 128 bytes in half precision and 256 in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from memprof.estimate.layers import DecoderLayer, record_layer
from memprof.estimate.projections import LayerSettings
from memprof.estimate.tape import Tape, Tensor
from tests.unit.estimate.tiny import TINY, run


def make(
    changes: Mapping[str, Any] = MappingProxyType({}),
    itemsize: int = 2,
    batch: int = 1,
    length: int = 1,
    **setting: Any,
) -> DecoderLayer:
    layer = LayerSettings(dataclasses.replace(TINY, **changes), batch, length, itemsize, **setting)
    return DecoderLayer(Tape(layer.tokens, layer.training), layer)


def tensors(layer: DecoderLayer, *widths: int, itemsize: int = 2) -> list[Tensor]:
    """Return tensors of these widths, which are live and need gradients."""
    return [layer.tape.allocate(width, itemsize, needs_grad=True, name=f"t{width}") for width in widths]


@pytest.mark.parametrize(
    ("changes", "setting", "expected"),
    [
        # float32 and statistics are saved, and what the weight scales; backward, the weight's gradient, the input in
        # float32, and three gradients of its size.
        ({}, {}, (256 + 4 + 128, 256 + 4 + 256 + 128, 128, 128 + 4 * 256)),
        ({}, {"trains_weights": False}, (256 + 4, 256 + 4 + 256 + 128, 0, 4 * 256)),
        # The input is float32 already, and counted with what made it.
        ({}, {"itemsize": 4, "amp": True}, (4 + 256, 4 + 256 + 256, 256, 4 + 4 * 256)),
        # Scaled in float32, and half precision last.
        ({"norm": "gemma"}, {}, (256 + 4 + 256, 256 + 4 + 256 + 256 + 128, 128, 256 + 4 + 4 * 256)),
        ({"norm": "olmo"}, {}, (256 + 4 + 256, 256 + 4 + 256 + 256 + 128, 128, 256 + 4 + 4 * 256)),
        # Mean and deviation; weight and bias.
        ({"norm": "layer"}, {}, (8, 128 + 8, 256, 8 + 128 + 128 + 256)),
        ({"norm": "layer"}, {"trains_weights": False}, (8, 128 + 8, 0, 8 + 128 + 128)),
    ],
)  # fmt: skip
def test_a_norm(changes: dict, setting: dict, expected: tuple) -> None:
    layer = make(changes, **setting)
    x = layer.tape.add_input(64, layer.setting.stream_itemsize, needs_grad=True, name="x")
    output = layer.record_norm(x, "normed")
    assert (output.width, output.itemsize, output.name) == (64, layer.setting.stream_itemsize, "normed")
    assert run(layer.tape, output) == expected
    assert not layer.tape.live - x.num_bytes - expected[2]


def test_a_norm_under_autocast_is_in_float32() -> None:
    layer = make({"norm": "layer"}, itemsize=4, amp=True)
    (x,) = tensors(layer, 64)
    assert layer._record_layer_norm(x, "normed").itemsize == 4
    assert layer.tape.saved_bytes == 256 + 8 and layer.tape.live == 128 + 256 + 8 + 256


@pytest.mark.parametrize(("qk_norm", "rows", "weights"), [("head", 4, 16), ("hidden", 1, 64)])
def test_a_norm_of_each_head_has_statistics_of_each(qk_norm: str, rows: int, weights: int) -> None:
    layer = make({"qk_norm": qk_norm})
    (x,) = tensors(layer, 64)
    output = layer._normalize_heads(x, "query", 4)
    assert output.name == "query, normed" and x.num_references == 0
    assert run(layer.tape, output)[::2] == (256 + 4 * rows + 128, 2 * weights)


@pytest.mark.parametrize(
    ("changes", "setting", "peak", "itemsize"),
    [
        # Beside the input: its product with the cosines, its halves turned and one of them negated, their product, sum.
        ({}, {}, 128 + 2 * 128 + 128, 2),
        ({}, {"itemsize": 4, "amp": True}, 128 + 256 + 256 + 256, 4),
        # A quarter of each head; the whole is joined again.
        ({"rotary_fraction": 0.25}, {}, 128 + 32 + 128, 2),
    ],
)
def test_rotary_positions(changes: dict, setting: dict, peak: int, itemsize: int) -> None:
    layer = make(changes, **setting)
    (x,) = tensors(layer, 64)
    output = layer.record_rotary(x, "query")
    assert (layer.tape.peak, layer.tape.live, layer.tape.saved_bytes) == (peak, 64 * itemsize, 0)
    assert (output.width, output.itemsize, output.name) == (64, itemsize, "query")


def test_no_rotary_positions() -> None:
    layer = make({"rotary_fraction": 0.0})
    (x,) = tensors(layer, 64)
    assert layer.record_rotary(x, "query") is x and x.num_references == 1


# Three sequences of ten tokens: a query has 3,840 bytes in half precision, keys and values 1,920 each.
Q, K = 30 * 64 * 2, 30 * 32 * 2
SUMS = 4 * 3 * 4 * 10


def attend(layer: DecoderLayer, itemsize: int = 2) -> Tensor:
    output = layer.record_attention(*tensors(layer, 64, layer.g.kv_width, layer.g.kv_width, itemsize=itemsize))
    assert output.name == "attention output"
    return output


@pytest.mark.parametrize(
    ("changes", "setting", "tensors_bytes", "extra", "temporaries"),
    [
        # Flash: sums of float32 for 128 rows and 32 columns of each head, and keys and values of all heads, beside the
        # gradients.
        ({}, {}, 2 * Q + 2 * K, SUMS, 4 * 3 * 4 * 128 * 33 + 2 * Q),
        ({"kv_heads": 4}, {}, 4 * Q, SUMS, 4 * 3 * 4 * 128 * 33),
        # Memory-efficient, with a mask: keys and values of all heads are saved, and the mask, its rows of 16 elements.
        ({}, {"padded": True}, 4 * Q, SUMS + 960, SUMS),
        # ... but of one head they are not repeated.
        ({"kv_heads": 1}, {"padded": True}, 2 * Q + K, SUMS + 960, SUMS),
        # ... and in float32.
        ({"kv_heads": 4}, {"itemsize": 4}, 8 * Q, SUMS, SUMS),
    ],
)  # fmt: skip
def test_fused_attention(changes: dict, setting: dict, tensors_bytes: int, extra: int, temporaries: int) -> None:
    """Inputs and result are saved, and something extra; each has a gradient, beside temporaries."""
    layer = make(changes, batch=3, length=10, **setting)
    saved = tensors_bytes + extra
    expected = saved, saved, 0, saved + tensors_bytes + temporaries
    assert run(layer.tape, attend(layer, layer.setting.itemsize)) == expected


@pytest.mark.parametrize(
    ("head_dim", "length", "rows", "columns"),
    [
        (16, 128, 128, 32),
        (16, 129, 256, 32),
        (33, 10, 128, 64),
        (128, 10, 128, 128),
        (129, 10, 128, 192),
        (256, 10, 128, 256),
    ],
)
def test_flash_attention_pads_rows_and_heads(head_dim: int, length: int, rows: int, columns: int) -> None:
    layer = make({"head_dim": head_dim, "kv_heads": 4}, length=length)
    output = layer.record_attention(*tensors(layer, *3 * [4 * head_dim]))
    one = output.num_bytes
    assert run(layer.tape, output)[3] == 8 * one + 16 * length + 16 * rows * (1 + columns)


def test_larger_heads_than_256_are_no_flash_attention() -> None:
    layer = make({"head_dim": 257, "kv_heads": 4}, length=10)
    output = layer.record_attention(*tensors(layer, *3 * [4 * 257]))
    assert run(layer.tape, output)[3] == 8 * output.num_bytes + 2 * 160


def test_grouped_heads_in_float32_have_scores() -> None:
    layer = make(batch=3, length=10, itemsize=4)
    query, scores = 2 * Q, 30 * 40 * 4
    output = attend(layer, 4)
    # Of all heads: queries and keys, both scaled, and values; and what the softmax made of 40 scores a token.
    assert layer.tape.saved_bytes == 3 * query + scores
    # ... and beside them the inputs, keys of all heads before they were scaled, and the output.
    assert layer.tape.peak == 3 * query + scores + 2 * query + query + query
    assert layer.tape.live == layer.tape.saved_bytes + output.num_bytes


@pytest.mark.parametrize(
    ("changes", "setting", "is_copied"),
    [
        ({}, {"itemsize": 4}, True),  # scores of grouped heads
        ({}, {"itemsize": 2}, False),
        ({"kv_heads": 4}, {"itemsize": 4}, False),
        ({}, {"itemsize": 4, "padded": True}, False),
        ({}, {"ulysses_ranks": 2}, True),
        *(({"family": family}, {}, True) for family in ("gemma2", "gpt_neox", "phi", "phi3")),
    ],
)
def test_heads_that_are_copied_side_by_side(changes: dict, setting: dict, is_copied: bool) -> None:
    assert make(changes, **setting)._has_strided_heads() == is_copied


def test_capped_scores_are_saved_after_tanh_and_after_the_softmax() -> None:
    layer = make({"family": "gemma2"}, batch=3, length=10)
    output = attend(layer)
    scores = 30 * 40 * 2
    # Query, keys and values of all heads; tanh, the softmax in float32, and that in half precision.
    assert layer.tape.saved_bytes == 3 * Q + scores + 2 * scores + scores
    assert layer.tape.live == layer.tape.saved_bytes + output.num_bytes
    assert layer.tape.peak == layer.tape.live + 2 * K
    assert {name: size for name, size in layer.tape.sum_saved_by_name().items() if "scores" in name} == {
        "attention scores, capped": scores, "attention scores, float32": 2 * scores,
        "attention scores after softmax": scores,
    }  # fmt: skip


def test_keys_and_values_go_into_the_cache() -> None:
    layer = make(batch=3, length=10, training=False, cache=True)
    output = attend(layer)
    assert (layer.tape.live, layer.tape.peak) == (output.num_bytes, 2 * Q + SUMS)


@pytest.mark.parametrize(
    ("kv_heads", "heads", "ranks", "width"),
    [(2, 4, 2, 32), (2, 4, 4, 64), (2, 8, 4, 64), (1, 4, 4, 64), (3, 6, 2, 96), (3, 6, 6, 96)],
)
def test_ranks_exchange_heads_for_tokens(kv_heads: int, heads: int, ranks: int, width: int) -> None:
    """Heads of keys and values are repeated where there are fewer than ranks, or a number that cannot be divided."""
    layer = make({"kv_heads": kv_heads, "heads": heads}, ulysses_ranks=ranks)
    q, k = tensors(layer, heads * 16, kv_heads * 16)
    layer.tape.peak = 0
    exchanged = layer._exchange_heads(q, k)
    assert [(t.width, t.name) for t in exchanged] == [
        (heads * 16, f"{q.name}, of all tokens"), (width, f"{k.name}, of all tokens"),
    ]  # fmt: skip
    assert layer.tape.live == sum(t.num_bytes for t in exchanged)
    # What is sent, and the same beside it.
    assert layer.tape.peak == max(2 * q.num_bytes + k.num_bytes, q.num_bytes + 2 * exchanged[1].num_bytes)


UP = 192 * 2
PYTHON_GELU = {"is_gated": False, "activation": "gelu-python"}


@pytest.mark.parametrize(
    ("changes", "setting", "saved", "peak", "grads"),
    [
        # Gate before and after its activation, up, and their product.
        ({}, {}, 4 * UP, 4 * UP + 128, 2 * 3 * 192 * 64),
        ({}, {"trains_weights": False}, 3 * UP, 4 * UP + 128, 0),
        ({"has_fused_gate_up": True}, {}, 4 * UP, 4 * UP + 128, 2 * 3 * 192 * 64),
        # Before and after the activation; of ReLU the latter alone.
        ({"is_gated": False, "activation": "gelu"}, {}, 2 * UP, 2 * UP + 128, 2 * 2 * 192 * 64),
        ({"is_gated": False, "activation": "relu"}, {}, UP, 2 * UP, 2 * 2 * 192 * 64),
        # Input and its half, tanh and what is one more, their product.
        (PYTHON_GELU, {}, 5 * UP, 5 * UP + 128, 2 * 2 * 192 * 64),
        # The cast input; up's half, and in float32 its input, tanh and one more; the product's cast.
        (PYTHON_GELU, {"itemsize": 4, "amp": True}, 128 + 8 * UP, 128 + 8 * UP + 2 * UP + 128, 4 * 2 * 192 * 64),
    ],
)  # fmt: skip
def test_an_mlp(changes: dict, setting: dict, saved: int, peak: int, grads: int) -> None:
    layer = make(changes, **setting)
    x = layer.tape.add_input(64, layer.setting.stream_itemsize, needs_grad=True, name="x")
    output = layer.record_mlp(x)
    assert layer.tape.live == saved + 128 == saved + output.num_bytes
    assert run(layer.tape, output)[:3] == (saved, peak, grads)


def test_dropout_keeps_a_byte_for_each_element() -> None:
    layer = make({"has_dropout": True})
    output = layer.record_dropout(*tensors(layer, 64))
    assert (layer.tape.saved_bytes, layer.tape.peak, layer.tape.live) == (64, 128 + 128 + 64, 128 + 64)
    assert output.name == "dropout"
    layer = make({"has_dropout": True})
    layer.record_dropout(layer.tape.allocate(64, 2, needs_grad=False))
    assert (layer.tape.saved_bytes, layer.tape.peak, layer.tape.live) == (0, 2 * 128, 128)
    for layer in (make(), make({"has_dropout": True}, training=False)):
        (x,) = tensors(layer, 64)
        assert layer.record_dropout(x) is x


NORM = 256 + 4 + 128 + 128  # float32, statistics, before its weight, result
FLOAT_NORM = 256 + 4 + 256  # before its weight in float32; its result is added, and not saved
LAYER_NORM = 8 + 128
ATTENTION = 128 + 64 + 64 + 128 + 16  # query, key, value, result, a sum for each head
PLAIN = {"norm": "layer", "is_gated": False, "kv_heads": 4}


@pytest.mark.parametrize(
    ("changes", "saved", "num_parameters"),
    [
        ({}, 2 * NORM + ATTENTION + 4 * UP, 49_152 + 128),
        ({"qk_norm": "head", "family": "qwen3"}, 2 * NORM + (256 + 16 + 128) + (128 + 8 + 64) + ATTENTION + 4 * UP,
         49_152 + 128 + 32),
        # Of norms before, the result too.
        ({"norm": "gemma", "num_norms": 4, "qk_norm": "head", "family": "gemma3_text"},
         2 * (FLOAT_NORM + 128) + 2 * FLOAT_NORM + (256 + 16 + 256) + (128 + 8 + 128) + ATTENTION + 4 * UP,
         49_152 + 4 * 64 + 32),
        # Scores: tanh and softmax, the latter in float32 too. The result's heads are copied side by side.
        ({"norm": "gemma", "num_norms": 4, "family": "gemma2"},
         2 * (FLOAT_NORM + 128) + 2 * FLOAT_NORM + 3 * 128 + 8 + 16 + 8 + 128 + 4 * UP, 49_152 + 4 * 64),
        # Norms after; attention and MLP read what comes into the layer, and the sum.
        ({"norm": "olmo", "qk_norm": "hidden", "family": "olmo2"},
         128 + 128 + 2 * FLOAT_NORM + FLOAT_NORM + (128 + 4 + 128) + ATTENTION + 4 * UP, 49_152 + 128 + 64 + 32),
        # Query, key and value are one tensor, of which the value is kept, and so all; heads side by side.
        ({"has_fused_qkv": True, "has_fused_gate_up": True, "family": "phi3"},
         2 * NORM + 256 + 128 + 64 + 128 + 16 + 128 + 4 * UP, 49_152 + 128),
        # The input of norms is saved as it is. Two masks of dropout.
        ({**PLAIN, "family": "gpt2", "activation": "gelu-python", "has_fused_qkv": True, "rotary_fraction": 0.0,
          "has_dropout": True},
         2 * (128 + LAYER_NORM) + 384 + 128 + 16 + 64 + 5 * UP + 64, 4 * 4096 + 2 * 12_288 + 256),
        ({**PLAIN, "family": "opt", "activation": "relu", "rotary_fraction": 0.0},
         2 * (128 + LAYER_NORM) + 3 * 128 + 128 + 16 + UP, 4 * 4096 + 2 * 12_288 + 256),
        # Attention and MLP side by side: one input, with two norms or one.
        ({**PLAIN, "family": "gpt_neox", "activation": "gelu", "has_fused_qkv": True, "rotary_fraction": 0.25},
         128 + 2 * LAYER_NORM + 2 * 128 + 384 + 128 + 16 + 128 + 2 * UP, 4 * 4096 + 2 * 12_288 + 256),
        ({**PLAIN, "family": "phi", "activation": "gelu-python", "rotary_fraction": 0.5, "num_norms": 1},
         128 + LAYER_NORM + 3 * 128 + 128 + 16 + 128 + 5 * UP, 4 * 4096 + 2 * 12_288 + 128),
    ],
)  # fmt: skip
def test_a_layer(changes: dict, saved: int, num_parameters: int) -> None:
    setting = make(changes).setting
    tape, found = record_layer(setting)
    assert found == saved == tape.saved_bytes
    counted_before = sum(size for name, size in tape.saved.items() if name.startswith("hidden states #0"))
    assert tape.live == saved - counted_before
    # The backward frees all but gradients, of the input and of the parameters.
    tape = Tape(1, training=True)
    hidden = tape.add_input(64, 2, needs_grad=True, name="hidden states")
    output = DecoderLayer(tape, setting).record(hidden)
    tape.drop(output)
    assert tape.run_backward(output) == 2 * num_parameters
    assert tape.live == 2 * num_parameters + 128


LLAMA = {
    "hidden states, float32 for the norm": 256, "norm statistics": 8, "input of attention before its weight": 128,
    "input of attention": 128, "query": 128, "key": 64, "value": 64, "attention output": 128,
    "attention output (statistics)": 16, "residual after attention, float32 for the norm": 256,
    "input of MLP before its weight": 128, "input of MLP": 128, "gate": UP, "activated gate": UP, "up": UP,
    "gate times up": UP,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "setting", "expected"),
    [
        ({}, {}, LLAMA),
        # With a mask, whose rows are of 16 elements, all heads have keys and values; a sum for each head.
        ({}, {"padded": True},
         {**{name: size for name, size in LLAMA.items() if name not in ("key", "value")},
          "key, repeated": 128, "value, repeated": 128, "attention output (statistics)": 16 + 32}),
        # Each of four heads and two has statistics of its own.
        ({"qk_norm": "head", "family": "qwen3"}, {},
         {**LLAMA, "norm statistics": 8 + 16 + 8, "query, float32 for the norm": 256,
          "query, normed before its weight": 128, "key, float32 for the norm": 128,
          "key, normed before its weight": 64}),
        # Query, key and value are views of one tensor; gate and up are one. Rotary positions make a query and a key.
        ({"has_fused_qkv": True, "has_fused_gate_up": True, "family": "phi3"}, {},
         {**{name: size for name, size in LLAMA.items() if name not in ("value", "gate", "up")},
          "query, key, value": 256, "attention output, heads side by side": 128, "gate and up": 2 * UP}),
        ({**PLAIN, "family": "gpt2", "activation": "gelu-python", "has_fused_qkv": True, "rotary_fraction": 0.0,
          "has_dropout": True}, {},
         {"hidden states": 128, "input of attention (statistics)": 8, "input of attention": 128,
          "query, key, value": 384, "attention output": 128, "attention output (statistics)": 16,
          "dropout (statistics)": 128, "residual after attention": 128, "input of MLP (statistics)": 8,
          "input of MLP": 128, "MLP up": UP, "half of the input of GELU": UP, "tanh of GELU": UP,
          "1 + tanh of GELU": UP, "activated": UP}),
        ({"norm": "gemma", "num_norms": 4, "family": "gemma2"}, {},
         {"hidden states, float32 for the norm": 256, "norm statistics": 16,
          "input of attention before its weight, float32": 256, "input of attention": 128, "query": 128,
          "key, repeated": 128, "value, repeated": 128, "attention scores, capped": 8,
          "attention scores, float32": 16, "attention scores after softmax": 8,
          "attention output, heads side by side": 128, "attention projection, float32 for the norm": 256,
          "output of attention, normed before its weight, float32": 256,
          "residual after attention, float32 for the norm": 256, "input of MLP before its weight, float32": 256,
          "input of MLP": 128, "gate": UP, "activated gate": UP, "up": UP, "gate times up": UP,
          "MLP down, float32 for the norm": 256, "output of MLP, normed before its weight, float32": 256}),
        ({}, {"itemsize": 4, "amp": True, "quantize": "int4", "trains_weights": False, "lora_rank": 8,
              "lora_targets": ("q", "v")},
         {"hidden states": 256, "norm statistics": 8, "input of attention, cast for LoRA": 256, "LoRA": 32,
          "query, cast": 128, "key, cast": 64, "value, cast": 64, "attention output": 128,
          "attention output (statistics)": 16, "residual after attention": 256, "gate": 2 * UP,
          "activated gate": 2 * UP, "up": 2 * UP}),
    ],
)  # fmt: skip
def test_saved_tensors_have_names(changes: dict, setting: dict, expected: dict[str, int]) -> None:
    """Those that `memprof estimate --explain` lists."""
    tape, _ = record_layer(make(changes, **setting).setting)
    assert tape.sum_saved_by_name() == expected


@pytest.mark.parametrize(
    ("setting", "saved"),
    [
        # The result's heads are side by side again.
        ({"ulysses_ranks": 2}, 2 * NORM + ATTENTION + 128 + 4 * UP),
        # In float32 the input and the sum are saved as they are; scaled queries and keys, values, and the softmax.
        ({"itemsize": 4}, 2 * (256 + 4 + 256 + 256) + 3 * 256 + 16 + 256 + 8 * UP),
        # Its input is saved by a matrix in int8; casts of query, key and value.
        (
            {"itemsize": 4, "amp": True, "quantize": "int8", "trains_weights": False},
            2 * (256 + 4 + 256) + ATTENTION + 8 * UP,
        ),
        ({"itemsize": 4, "padded": True}, 2 * (256 + 4 + 256 + 256) + 3 * 256 + 256 + 16 + 64 + 8 * UP),
    ],
)
def test_a_layer_in_other_settings(setting: dict, saved: int) -> None:
    layer = make(**setting)
    assert record_layer(layer.setting)[1] == saved
    # The backward frees all but gradients.
    hidden = layer.tape.add_input(64, layer.setting.stream_itemsize, needs_grad=True, name="hidden states")
    output = layer.record(hidden)
    layer.tape.drop(output)
    grads = layer.setting.itemsize * (49_152 + 128) * layer.setting.trains_weights
    assert layer.tape.run_backward(output) == grads
    assert layer.tape.live == grads + hidden.num_bytes


def test_a_mask_has_rows_of_16_elements() -> None:
    layer = make({"kv_heads": 4}, length=17, padded=True)
    assert attend(layer).num_bytes == 17 * 128
    assert layer.tape.saved_bytes == 4 * 17 * 128 + 17 * 16 + 2 * 17 * 32


def test_a_frozen_layer_saves_what_its_inputs_gradients_need() -> None:
    lora = {"trains_weights": False, "lora_rank": 8, "lora_targets": ("q", "v")}
    # Of a norm, its result in float32 once for each adapter, whose matrices have eight elements between them.
    adapters = 2 * (256 + 4 * 8)
    assert record_layer(make(**lora).setting)[1] == 2 * (256 + 4) + adapters + ATTENTION + 3 * UP
    # The input of the first layer needs no gradient, and so the first norm saves nothing.
    assert record_layer(make(**lora).setting, hidden_needs_grad=False)[1] == 256 + 4 + adapters + ATTENTION + 3 * UP
