"""Configurations that are wrong, contradict an option, or scale the context."""

from __future__ import annotations

from typing import Any

import pytest

from memprof.errors import UsageError
from memprof.estimate.serving.model import build_served_model
from memprof.estimate.serving.weights import find_weight_format

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize(
    "entry",
    [
        {"quantization_config": "fp8"}, {"rope_scaling": "linear"}, {"rope_scaling": {"type": "yarn", "factor": "x"}},
        {"rope_scaling": {"type": "linear", "factor": -1}}, {"vision_config": [1]},
    ],
)  # fmt: skip
def test_wrong_entries_are_errors(entry: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="configuration is"):
        build_served_model({**LLAMA, **entry}, "mine")


@pytest.mark.parametrize(
    ("entry", "hint"),
    [
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "4096"}, "hidden_size must be a positive whole number, not '4096'"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0001}}, "its context has no tokens"),
    ],
)
def test_what_is_wrong_in_a_configuration_is_named(entry: dict[str, Any], hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        build_served_model({**LLAMA, **entry}, "mine")
    assert (refused.value.value, refused.value.hint) == ("mine", hint)


def test_groups_that_are_no_object_are_an_error() -> None:
    quantization = {"quant_method": "compressed-tensors", "config_groups": [1]}
    with pytest.raises(UsageError, match="configuration is wrong"):
        find_weight_format(build_served_model({**LLAMA, "quantization_config": quantization}, "mine"), None)


def test_another_format_than_the_published_one_is_an_error() -> None:
    model = build_served_model({**LLAMA, "quantization_config": {"quant_method": "awq"}}, "mine")
    with pytest.raises(UsageError, match="another format"):
        find_weight_format(model, "int8")


@pytest.mark.parametrize(
    ("scaling", "longest", "default"),
    [
        ({"type": "linear", "factor": 4.0}, 32768, 32768), ({"rope_type": "llama3", "factor": 8.0}, 8192, 8192),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 32768, 32768),
        ({"type": "longrope"}, 8192, 2048),
    ],
)  # fmt: skip
def test_scaling_makes_the_context_longer(scaling: dict[str, Any], longest: int, default: int) -> None:
    config = {**LLAMA, "rope_scaling": scaling, "original_max_position_embeddings": 2048}
    model = build_served_model(config, "mine")
    assert (model.max_positions, model.default_length) == (longest, default)
