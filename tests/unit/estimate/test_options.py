"""Options of an estimate: their defaults, and which values each takes."""

from __future__ import annotations

import dataclasses

import pytest

from memprof.estimate.options import EstimateOptions
from memprof.spec import TargetSpec, get_options


def test_defaults_are_one_sequence_on_one_gpu() -> None:
    assert dataclasses.asdict(EstimateOptions()) == {
        "dtype": None, "quantize": None, "context_length": None, "batch_size": 1, "lengths": None,
        "empties_cache": False, "new_tokens": None, "lora_rank": 8, "lora_targets": None, "optimizer": "adamw",
        "optimizer_impl": None, "gpus": 1, "parallel": None, "chunked_loss": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("quantize", "int8 nf4 fp4 fp8 gptq-int8 gptq-int4 awq-int4"),
        ("optimizer", "adamw adam sgd sgd-momentum adagrad rmsprop adamw-8bit paged-adamw-8bit torchao-adamw-8bit "
         "torchao-adamw-4bit none"),
        ("optimizer_impl", "foreach fused"),
    ],
)  # fmt: skip
def test_choices(name: str, choices: str) -> None:
    assert set(choices.split()) <= set(get_options(EstimateOptions)[name].choices)


def test_an_option_is_that_of_a_profile() -> None:
    options, of_profile = get_options(EstimateOptions), get_options(TargetSpec)
    own = {name for name in options if name not in of_profile}
    assert own == {"empties_cache", "chunked_loss"}
    for name, about in options.items():
        if name not in own:
            original = of_profile[name]
            assert (about.flag, about.is_count) == (original.flag, original.is_count)
            assert about.help.startswith(original.help)
    assert {name: options[name].unset for name in ("dtype", "new_tokens", "lora_rank")} == {
        "dtype": "bfloat16", "new_tokens": "1: the prompt alone", "lora_rank": "8",
    }  # fmt: skip
    assert {about.panel for name, about in options.items() if name in own} == {"Memory"}
