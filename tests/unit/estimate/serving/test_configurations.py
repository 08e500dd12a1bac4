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
    ("entry", "value", "hint"),
    [
        ({"quantization_config": "fp8"}, "mine: quantization_config is 'fp8'", "make quantization_config an object"),
        ({"rope_scaling": "linear"}, "mine: rope_scaling is 'linear'", "make rope_scaling an object"),
        ({"vision_config": [1]}, "mine: vision_config is [1]", "make vision_config an object"),
        ({"rope_scaling": {"type": "yarn", "factor": "x"}}, "mine", "could not convert string to float: 'x'"),
        (
            {"rope_scaling": {"type": "yarn", "factor": [1]}},
            "mine",
            "float() argument must be a string or a real number, not 'list'",
        ),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "mine", "its context has no tokens"),
        ({"rope_scaling": {"type": "linear", "factor": 1 / 8193}}, "mine", "its context has no tokens"),
        ({"hidden_size": None}, "mine", "'hidden_size' is missing"),
        ({"hidden_size": "4096"}, "mine", "hidden_size must be a positive whole number, not '4096'"),
    ],
)
def test_what_is_wrong_in_a_configuration_is_named(entry: dict[str, Any], value: str, hint: str) -> None:
    with pytest.raises(UsageError, match="configuration is") as refused:
        build_served_model({**LLAMA, **entry}, "mine")
    assert (refused.value.value, refused.value.hint) == (value, hint)


def test_a_context_of_one_token_is_one() -> None:
    config = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 1 / 8192}}
    assert build_served_model(config, "mine").max_positions == 1


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
