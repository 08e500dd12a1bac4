"""Methods of an estimate: in which dtypes they are, and how each is asked of a simulated run."""

from __future__ import annotations

from typing import Any

import pytest

from memprof.estimate.methods import CHECKPOINT_FORMATS, METHODS, WEIGHT_DTYPES
from tests.unit.estimate.tiny import plan


def test_dtypes_of_the_methods() -> None:
    columns = (*WEIGHT_DTYPES, *CHECKPOINT_FORMATS)
    assert [(method.key, sum(method.supports(column) for column in columns)) for method in METHODS] == [
        ("weights", 9), ("inference", 9), ("lora", 5), ("lora-checkpointing", 5), ("full", 3),
        ("full-checkpointing", 3), ("mixed", 2), ("mixed-checkpointing", 2), ("adamw-8bit", 3),
        ("adamw-8bit-checkpointing", 3),
    ]  # fmt: skip
    assert [method.checkpointing for method in METHODS] == ["checkpointing" in method.key for method in METHODS]
    assert [method.trains for method in METHODS] == [False, False, *8 * [True]]
    assert not plan("mixed").method.supports("float32")


TRAINING = {"optimizer": "adamw", "activation_checkpointing": False}
LORA = {"adapter": "lora", "lora_rank": 8, "lora_targets": None}


@pytest.mark.parametrize(
    ("method", "column", "more", "itemsize", "fields"),
    [
        ("inference", "float32", {}, 4, {"dtype": "float32", "mode": "inference", "new_tokens": 1}),
        ("inference", "fp8", {"new_tokens": 5}, 2,
         {"dtype": "bfloat16", "quantize": "fp8", "mode": "inference", "new_tokens": 5}),
        ("full", "float16", {}, 2, {"dtype": "float16", **TRAINING}),
        ("full-checkpointing", "bfloat16", {"fused": True, "optimizer": "sgd"}, 2,
         {"dtype": "bfloat16", "optimizer": "sgd", "optimizer_impl": "fused", "activation_checkpointing": True}),
        ("full", "float32", {"chunked_loss": True}, 4, {"dtype": "float32", "fixes": ("chunked-loss",), **TRAINING}),
        ("mixed", "bfloat16", {}, 4, {"amp": "bfloat16", **TRAINING}),
        ("mixed", "float16", {}, 4, {"amp": "float16", **TRAINING}),
        ("adamw-8bit", "bfloat16", {"optimizer": "sgd"}, 2,
         {"dtype": "bfloat16", "optimizer": "adamw-8bit", "activation_checkpointing": False}),
        ("lora", "bfloat16", {}, 2, {"dtype": "bfloat16", **LORA, **TRAINING}),
        ("lora", "int4", {"lora_rank": 4, "lora_targets": "q_proj"}, 4,
         {"amp": "bfloat16", "quantize": "nf4", **LORA, "lora_rank": 4, "lora_targets": "q_proj", **TRAINING}),
        ("lora", "int8", {}, 4, {"amp": "bfloat16", "quantize": "int8", **LORA, **TRAINING}),
    ],
)  # fmt: skip
def test_a_plan_as_a_run(method: str, column: str, more: dict[str, Any], itemsize: int, fields: dict[str, Any]) -> None:
    asked = plan(method, column, **more)
    assert asked.build_spec_fields() == fields
    assert asked.itemsize == itemsize
