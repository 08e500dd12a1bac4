"""What is said of a figure of an estimate: its formula has the model's own numbers."""

from __future__ import annotations

import dataclasses
import re

import pytest

from memprof.estimate.explain import CONSTANTS, format_formula, list_assumptions, list_saved_tensors
from memprof.estimate.geometry import build_from_params
from memprof.estimate.options import CLOSED_FORM_OPTIMIZERS, EstimateOptions
from memprof.estimate.table import build_estimate
from memprof.spec import OPTIMIZERS
from tests.unit.estimate.tiny import COUNT, tiny_model

ESTIMATE = build_estimate(tiny_model(), EstimateOptions(batch_size=2, context_length=10))
REST = "embedding, head and norms: "


@pytest.mark.parametrize(
    ("method", "column", "term", "formula"),
    [
        ("full", "bfloat16", "parameters", f"{COUNT:,} parameters x 2 bytes"),
        ("inference", "int8", "parameters", f"linear layers: 1 byte and a float32 per row; {REST}2 bytes"),
        ("lora", "int4", "parameters", f"linear layers: 1/2 byte + 1/64 + 1/4,096; {REST}4 bytes"),
        ("full", "bfloat16", "optimizer state", "2 x 2 bytes per trained parameter"),
        ("lora", "bfloat16", "optimizer state", "2 x 4 bytes per trained parameter"),
        ("lora", "bfloat16", "parameters", f"{COUNT:,} parameters x 2 bytes"),
        ("adamw-8bit", "bfloat16", "optimizer state", "2 x (1 + 4/256) bytes per parameter"),
        ("mixed", "bfloat16", "gradients", "4 bytes per trained parameter, as far as there are any at this moment"),
        ("full", "float32", "temporaries", "sqrt of the second moment: 4 bytes per trained parameter"),
        ("inference", "float16", "KV cache", "2 x 3 layers x 32 elements x 20 tokens x 2 bytes"),
        ("inference", "float16", "activations", "tensors of one layer, its input, the embedding's output"),
        ("full", "bfloat16", "library workspace", "cuBLAS, one per thread"),
        ("full", "bfloat16", "buffers", ""),
        ("mixed", "bfloat16", "logits and loss", "logits 2 x 1,000 x 20 tokens, with what is made of them"),
    ],
)  # fmt: skip
def test_formulas(method: str, column: str, term: str, formula: str) -> None:
    assert format_formula(ESTIMATE, ESTIMATE.cells[method, column], term) == formula


@pytest.mark.parametrize(
    ("method", "peak", "activations", "logits"),
    [
        ("lora", "loss, backward", "what the layers keep", "(logits 2 + log-softmax 4 + its gradients 2 x 4) x 1,000"),
        ("full", "loss, forward", "what the layers keep", "(logits 2 + their float32 copy 4 + log-softmax 4) x 1,000"),
        ("full-checkpointing", "first layer, backward", "each layer's input, what one", "logits 2 x 1,000 x 20 tokens"),
        ("full", "embedding, backward", "the gradient of the embedding's output", "logits 2 x 1,000 x 20 tokens"),
    ],
)  # fmt: skip
def test_formulas_of_the_peaks_moment(method: str, peak: str, activations: str, logits: str) -> None:
    cell = ESTIMATE.cells[method, "bfloat16"]
    cell = dataclasses.replace(cell, moments=tuple(moment for moment in cell.moments if moment.name == peak))
    assert format_formula(ESTIMATE, cell, "activations").startswith(activations)
    assert format_formula(ESTIMATE, cell, "logits and loss").startswith(logits)


def test_saved_tensors_are_those_of_a_token_largest_first() -> None:
    saved = list_saved_tensors(ESTIMATE, ESTIMATE.cells["full", "bfloat16"])
    assert [size for _, size in saved] == sorted((size for _, size in saved), reverse=True)
    assert sum(size for _, size in saved) == 2 * 516 + 400 + 4 * 384  # as in test_layers.py
    assert dict(saved)["gate"] == 384
    assert "buckets of gradients (DDP)" in format_formula(ESTIMATE, ESTIMATE.cells["full", "bfloat16"], "communication")
    for cell, estimate in (
        (ESTIMATE.cells["inference", "bfloat16"], ESTIMATE),
        (ESTIMATE.cells["full", "bfloat16"], build_estimate(tiny_model(None, COUNT))),
    ):
        assert list_saved_tensors(estimate, cell) == []


def test_assumptions_are_of_what_was_asked() -> None:
    plain = list_assumptions(ESTIMATE)
    assert any("LoRA of rank 8" in text for text in plain)
    assert all(plain)
    for options, said in (
        (EstimateOptions(dtype="fp8"), "Scales for each 128 weights"),
        (EstimateOptions(gpus=2), "Several GPUs"),
        (EstimateOptions(lengths="alpaca", context_length=10), "longest of 200 batches"),
    ):
        assert said not in " ".join(plain) and said in " ".join(list_assumptions(build_estimate(tiny_model(), options)))
    assert list_assumptions(build_estimate(build_from_params("1.2B")))[0].startswith("Only a number of parameters")


def test_constants_have_a_value_and_a_source() -> None:
    assert all(constant.value and constant.source for constant in CONSTANTS)
    numbers = {constant.name: " ".join(re.findall(r"[\d./,]*\d", constant.value)) for constant in CONSTANTS}
    assert numbers == {
        "CUDA context": "426.00 9.0 750.00", "cuBLAS workspace": "8.12 9.0 32.00", "AdamW's state": "2",
        "AdamW's temporaries": "1", "8-bit AdamW's state": "2 2 32 256",
        "other optimizers' state": "1 1 1 1 2 4 1 1/16", "int8 weights": "1 32", "int4 weights": "1/2 64 32 16,384 2",
        "loss in float32": "3 4", "KV cache": "2",
    }  # fmt: skip


def test_optimizers_of_the_closed_form() -> None:
    assert set(OPTIMIZERS) - set(CLOSED_FORM_OPTIMIZERS) == {"adafactor"}
