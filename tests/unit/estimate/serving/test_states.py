"""States of a request in layers that keep one, and which layers of a model those are."""

from __future__ import annotations

from typing import Any

import pytest

from memprof.estimate.serving.model import CachedLayer, build_served_model
from memprof.estimate.serving.states import StateShape, read_state_shape
from tests.unit.estimate.serving.test_weights import GEMMA_4, LATENT, LLAMA, NEMOTRON

DELTA = {
    "hidden_size": 48, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "text", "shape"),
    [
        # Keys of 16, values of 64: queries, keys and values are 96 channels, and the gate has 64.
        (
            "qwen3_next", DELTA, StateShape(96, 2, 4, 16, 8, 2, 48 * (96 + 64 + 2 * 4), 64 * 48, 96 * 3 + 2 * 4, 16),
        ),
        (
            "qwen3_5_moe_text", {"hidden_size": 48, "mamba_ssm_dtype": "float32"},
            StateShape(8192, 3, 32, 128, 128, 4, 48 * (8192 + 4096 + 64), 4096 * 48, 8192 * 4 + 64, 128),
        ),
        # 4 heads of 8 are 32, with two groups of 2 x 16.
        (
            "nemotron_h", NEMOTRON,
            StateShape(96, 3, 4, 8, 16, 2, 48 * (96 + 32 + 4), 32 * 48, 96 * 4 + 96 + 3 * 4 + 32, 0),
        ),
        (
            "nemotron_h",
            {"hidden_size": 48, "mamba_num_heads": 4, "mamba_head_dim": 8, "use_conv_bias": False,
             "mamba_ssm_cache_dtype": "float32"},
            StateShape(32 + 2 * 8 * 128, 3, 4, 8, 128, 4, 48 * (2080 + 36), 32 * 48, 2080 * 4 + 3 * 4 + 32, 0),
        ),
        ("llama", NEMOTRON, None),
    ],
)  # fmt: skip
def test_shapes_of_states(family: str, text: dict[str, Any], shape: StateShape | None) -> None:
    assert read_state_shape(family, text) == shape


@pytest.mark.parametrize(("ranks", "num_bytes"), [(1, 96 * 2 * 2 + 4 * 16 * 8 * 2), (2, 48 * 2 * 2 + 2 * 16 * 8 * 2)])
def test_ranks_divide_states(ranks: int, num_bytes: int) -> None:
    shape = read_state_shape("qwen3_next", DELTA)
    assert shape is not None and shape.count_bytes(ranks, 2) == num_bytes


FULL, WINDOW, STATE = "full", "window", "state"
OF_LAYERS = {**LLAMA, "num_hidden_layers": 6, "sliding_window": 64, "head_dim": 32}


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (LLAMA, [FULL] * 2),
        (OF_LAYERS, [FULL] * 6),
        (OF_LAYERS | {"model_type": "mistral"}, [WINDOW] * 6),
        (OF_LAYERS | {"model_type": "mistral", "sliding_window": None}, [FULL] * 6),
        (OF_LAYERS | {"model_type": "gemma2"}, [WINDOW, FULL] * 3),
        (OF_LAYERS | {"model_type": "gpt_oss", "num_local_experts": 4}, [WINDOW, FULL] * 3),
        (OF_LAYERS | {"model_type": "gemma3_text"}, [WINDOW] * 5 + [FULL]),
        (OF_LAYERS | {"model_type": "gemma3_text", "sliding_window_pattern": 2}, [WINDOW, FULL] * 3),
        (GEMMA_4, [WINDOW, WINDOW, FULL] * 2),
        (GEMMA_4 | {"num_kv_shared_layers": 2}, [WINDOW, WINDOW, FULL, WINDOW]),
        (GEMMA_4 | {"layer_types": ["full_attention"]}, [WINDOW] * 5 + [FULL]),
        (OF_LAYERS | {"model_type": "qwen3_next"}, [STATE] * 3 + [FULL] + [STATE] * 2),
        (OF_LAYERS | {"model_type": "qwen3_next", "full_attention_interval": 2}, [STATE, FULL] * 3),
        (NEMOTRON | {"hybrid_override_pattern": "M*-M"}, [STATE, FULL, STATE]),
        (NEMOTRON | {"layer_types": ["mamba", "attention", "moe", "mamba"]}, [STATE, FULL, STATE]),
        (NEMOTRON | {"layers_block_type": ["attention", "mlp", "mamba", "moe"]}, [FULL, STATE]),
    ],
)
def test_layers_with_a_cache_or_a_state(config: dict[str, Any], kinds: list[str]) -> None:
    assert [layer.kind for layer in build_served_model(config, "tiny").layers] == kinds


def test_sizes_of_caches() -> None:
    full = {**GEMMA_4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "sliding_window": 64}
    window = CachedLayer(WINDOW, 2, 12, 64)
    assert build_served_model(full, "tiny").layers[1:3] == (window, CachedLayer(FULL, 1, 24))
    del full["sliding_window"]
    assert build_served_model(full, "tiny").layers[1] == CachedLayer(WINDOW, 2, 12, 0)
    del full["global_head_dim"], full["attention_k_eq_v"]  # those heads are of layers whose values are their keys
    assert build_served_model(full, "tiny").layers[2] == CachedLayer(FULL, 2, 512)
    assert set(build_served_model(LATENT, "tiny").layers) == {CachedLayer("latent", 1, 64 + 8)}
