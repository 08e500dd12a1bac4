"""Blocks of quantized checkpoints that keep their dtype."""

from __future__ import annotations

from typing import Any

import pytest

from memprof.errors import UsageError
from memprof.estimate.serving.lookup import load_served_model
from memprof.estimate.serving.model import build_served_model
from memprof.estimate.serving.unquantized import compute_kept_shares, list_published_exceptions
from memprof.estimate.serving.weights import count_weight_bytes, find_weight_format, list_parts
from memprof.units import GIB
from tests.unit.estimate.serving.test_weights import HOPPER, LLAMA


@pytest.mark.parametrize(
    ("entry", "shares"),
    [
        (None, {}),
        ({"ignore": ["lm_head", "re:.*router", "re:.*mlp.gate$"]}, {}),
        ({"ignore": ["re:.*self_attn.*"]}, {"attention": 1.0}),
        ({"ignore": ["re:.*linear_attn.*"]}, {"state": 1.0}),
        (
            {"exclude_modules": ["lm_head", "model.layers.0.self_attn*", "model.layers.3.self_attn*"]},
            {"attention": 0.5},
        ),
        ({"ignore": ["model.language_model.layers.1.mlp.down_proj"]}, {"mlp": 0.25}),
        ({"modules_to_not_convert": ["visual", "mlp.shared_expert"]}, {"shared expert": 1.0}),
        ({"modules_to_not_convert": ["attn"]}, {}),  # a part of a name is one between dots
        ({"exclude_modules": ["*.experts.*"]}, {"experts": 1.0}),
    ],
)
def test_lists_of_configurations(entry: dict[str, Any] | None, shares: dict[str, float]) -> None:
    assert compute_kept_shares(entry, 4) == shares


def test_layer_1_is_not_layer_10() -> None:
    assert set(compute_kept_shares({"ignore": ["model.layers.1"]}, 20).values()) == {1 / 20}


@pytest.mark.parametrize("names", ["lm_head", [1], ["re:("]])
def test_a_list_that_is_none_is_refused(names: Any) -> None:
    with pytest.raises(UsageError, match=r"quantization_config\.ignore"):
        compute_kept_shares({"ignore": names}, 4)


def test_matrices_that_are_kept_have_their_dtype() -> None:
    """Of two layers one keeps its attention: 2 bytes for each of its weights, 1 for all others."""
    entry = {"quant_method": "modelopt", "quant_algo": "FP8"}
    plain, kept = (
        build_served_model({**LLAMA, "quantization_config": {**entry, "exclude_modules": names}}, "tiny")
        for names in ([], ["model.layers.1.self_attn*"])
    )
    attention = sum(part.count for part in list_parts(plain) if part.block == "attention")
    difference = count_weight_bytes(kept, find_weight_format(kept, None), 1, HOPPER) - count_weight_bytes(
        plain, find_weight_format(plain, None), 1, HOPPER
    )
    assert difference == attention


def test_what_checkpoints_leave_out_that_were_read() -> None:
    assert list_published_exceptions("RedHatAI/Qwen3-8B-NVFP4", "-nvfp4", has_experts=False) == ["re:.*linear_attn.*"]
    assert list_published_exceptions("Qwen/Qwen3-8B-FP8", "-fp8", has_experts=False) == []
    both = ["re:.*linear_attn.*", "re:.*self_attn.*"]
    assert list_published_exceptions("nvidia/GLM-4.7-NVFP4", "-nvfp4", has_experts=True) == both
    assert list_published_exceptions("nvidia/Llama-3.3-70B-Instruct-FP4", "-fp4", has_experts=False) == both[:1]
    assert list_published_exceptions("RedHatAI/GLM-4.7-NVFP4", "-nvfp4", has_experts=True) == both[:1]


def test_linear_attention_is_left_out_of_a_published_checkpoint() -> None:
    """A start-up log of RedHatAI/Qwen3.6-35B-A3B-NVFP4 with vLLM 0.20.0 has 21.86 GiB of weights."""
    model = load_served_model("RedHatAI/Qwen3.6-35B-A3B-NVFP4")
    assert count_weight_bytes(model, find_weight_format(model, None), 1, (12, 0)) / GIB == pytest.approx(
        21.86, abs=0.05
    )
