"""Layers that keep a state of fixed size for each request: gated delta nets (Qwen3-Next and later) and Mamba 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state of a layer, and the layer's weights. vllm/model_executor/layers/mamba/mamba_utils.py
    (gated_delta_net_state_shape, mamba2_state_shape), 0.29."""

    conv_width: int  # Channels of the convolution.
    conv_length: int  # Inputs that the convolution keeps: its kernel less one.
    heads: int
    head_dim: int
    state_dim: int
    state_itemsize: int  # Bytes of an element of the recurrent state.
    # Weights of a layer, of which those of the input, the output and others are divided over the ranks.
    input_parameters: int
    output_parameters: int
    other_parameters: int
    replicated_parameters: int

    def count_bytes(self, tensor_parallel: int, itemsize: int) -> int:
        """Return the bytes of one request's state in one layer on one rank; `itemsize` is that of activations."""
        conv = self.conv_width // tensor_parallel * self.conv_length * itemsize
        return conv + self.heads // tensor_parallel * self.head_dim * self.state_dim * self.state_itemsize


def read_state_shape(family: str, text: Mapping[str, Any]) -> StateShape | None:
    """Return the shape of a model's layers with a state; None: it has none."""
    if family.startswith(("qwen3_next", "qwen3_5")):
        return _read_delta_net(text)
    return _read_mamba2(text) if family == "nemotron_h" else None


def _read_delta_net(text: Mapping[str, Any]) -> StateShape:
    hidden = text["hidden_size"]
    key_heads, value_heads = text.get("linear_num_key_heads", 16), text.get("linear_num_value_heads", 32)
    key_dim, value_dim = text.get("linear_key_head_dim", 128), text.get("linear_value_head_dim", 128)
    kernel = text.get("linear_conv_kernel_dim", 4)
    keys, values = key_heads * key_dim, value_heads * value_dim
    conv_width = 2 * keys + values
    # In: queries, keys, values and a gate, and two numbers for each value head; convolution; decay; out.
    return StateShape(
        conv_width, kernel - 1, value_heads, value_dim, key_dim, _read_state_itemsize(text),
        input_parameters=hidden * (conv_width + values + 2 * value_heads), output_parameters=values * hidden,
        other_parameters=conv_width * kernel + 2 * value_heads, replicated_parameters=value_dim,
    )  # fmt: skip


def _read_mamba2(text: Mapping[str, Any]) -> StateShape:
    hidden, heads, head_dim = text["hidden_size"], text["mamba_num_heads"], text["mamba_head_dim"]
    state_dim, groups = text.get("ssm_state_size", 128), text.get("n_groups", 8)
    kernel, inner = text.get("conv_kernel", 4), heads * head_dim
    conv_width = inner + 2 * groups * state_dim
    bias = conv_width if text.get("use_conv_bias", True) else 0
    return StateShape(
        conv_width, kernel - 1, heads, head_dim, state_dim, _read_state_itemsize(text),
        input_parameters=hidden * (conv_width + inner + heads), output_parameters=inner * hidden,
        other_parameters=conv_width * kernel + bias + 3 * heads + inner, replicated_parameters=0,
    )  # fmt: skip


def _read_state_itemsize(text: Mapping[str, Any]) -> int:
    """Return the bytes of a state's element: configurations name float32 where the model needs it."""
    name = text.get("mamba_ssm_dtype") or text.get("mamba_ssm_cache_dtype") or ""
    return 4 if name == "float32" else 2
