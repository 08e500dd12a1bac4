"""The closed form against the virtual GPU: a sample of `python -m tests.benchmarks.estimate`, and what it states."""

import statistics
from dataclasses import asdict

import pytest

from memprof.device.catalog import custom_gpu
from memprof.device.context import CONTEXT_BYTES
from memprof.estimate.geometry import build_from_model, build_from_params
from memprof.estimate.methods import BANDED_KINDS, METHOD_BY_KEY, MethodPlan
from memprof.estimate.options import EstimateOptions
from memprof.estimate.table import DEVICE_USED, FITS, MEMORY_KINDS, NO, build_estimate, read_band
from memprof.flows.estimate import simulate
from tests.accuracy.published.rows import read_rows
from tests.benchmarks import estimate_published
from tests.lanes import by_day

SAMPLE = [
    ("gpt2", "full", "bfloat16", 1, 1024),
    ("gpt2", "inference", "bfloat16", 2, 300),
    ("gpt2", "mixed", "float16", 1, 512),
    ("pythia-70m", "lora", "bfloat16", 3, 500),
    ("pythia-70m", "full-checkpointing", "bfloat16", 1, 2048),
    ("smollm-135m", "adamw-8bit", "bfloat16", 2, 700),
    ("smollm-135m", "lora", "int4", 1, 1024),
    ("smollm-135m", "inference", "int4", 1, 1024),
    ("qwen2.5-0.5b", "full", "bfloat16", 1, 1500),
    ("qwen2.5-0.5b", "mixed-checkpointing", "bfloat16", 2, 512),
    ("qwen3-0.6b", "full", "float32", 1, 256),
    ("opt-125m", "lora-checkpointing", "bfloat16", 2, 640),
]


def compared(model, method, dtype, batch_size, context_length, **asked):
    subject = build_from_model(model)
    answer = build_estimate(subject, EstimateOptions(context_length=context_length, batch_size=batch_size, **asked))
    cell = answer.cells[method, dtype]
    return cell, simulate(subject, cell.plan, batch_size, answer.context_length)


BY_DAY = [SAMPLE[at] for at in (0, 4)]


@pytest.mark.parametrize(("model", "method", "dtype", "batch_size", "context_length"), by_day(SAMPLE, *BY_DAY))
def test_within_the_stated_band(model, method, dtype, batch_size, context_length):
    cell, run = compared(model, method, dtype, batch_size, context_length)
    assert cell.allocated_bytes == pytest.approx(run.allocated_bytes, rel=0.05)
    _, low, high = cell.compute_ranges()[DEVICE_USED]
    assert low - 1e-9 * low <= run.allocated_bytes + CONTEXT_BYTES
    assert run.required_bytes <= high
    # And so no verdict is wrong: a GPU on which it "fits" has all that is reserved, one with "no" less than is needed.
    assert cell.judge_fit(custom_gpu(run.required_bytes - 1)) != FITS
    assert cell.judge_fit(custom_gpu(run.required_bytes)) != NO


@pytest.mark.parametrize(
    ("case", "asked"),
    [
        pytest.param(("smollm-135m", "inference", "bfloat16", 1, 16), {"new_tokens": 700}, marks=pytest.mark.nightly),
        (("pythia-70m", "lora", "bfloat16", 1, 512), {"lora_targets": "all-linear", "lora_rank": 64}),
        (("pythia-70m", "full-checkpointing", "float32", 1, 64), {"optimizer": "adagrad"}),
        (("pythia-70m", "full-checkpointing", "float32", 1, 64), {"optimizer_impl": "fused"}),
    ],
)
def test_what_is_asked_beside_the_shape(case, asked):
    cell, run = compared(*case, **asked)
    assert cell.allocated_bytes == pytest.approx(run.allocated_bytes, rel=0.02)


@pytest.mark.nightly
def test_windows_of_some_layers():
    """Gemma 3's layers with a window keep a mask each; those without have flash attention and none."""
    cell, run = compared("gemma-3-1b", "full", "bfloat16", 2, 1024)
    assert cell.peak.terms["activations"] == pytest.approx(run.categories["activations"], rel=0.01)


@pytest.mark.nightly
def test_padding_keeps_a_mask_in_each_layer(tmp_path):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("200 512 300 400")
    subject = build_from_model("smollm-135m")
    answer = build_estimate(subject, EstimateOptions(lengths=str(lengths), batch_size=2))
    cell = answer.cells["lora", "bfloat16"]
    run = simulate(subject, cell.plan, 2, answer.context_length, lengths=str(lengths), steps=3)
    assert cell.peak.terms["activations"] == pytest.approx(run.categories["activations"], rel=0.01)


def test_published_figures(shared_dir):
    """Every row is asked or has a reason, and the stated bands are those that the figures give."""
    rows = read_rows(shared_dir / "published_memory.csv")
    asked, reasons = estimate_published.ask(rows)
    assert len(asked) + reasons.total() == len(rows)
    stated = estimate_published.measured(asked)
    assert stated == {
        method: {kind: asdict(read_band(kind, method)) for kind in MEMORY_KINDS} for method in BANDED_KINDS
    }
    assert statistics.mean(row.inside for row in asked) >= 0.95


def test_a_number_of_parameters_is_simulated_in_its_shape():
    subject = build_from_params("30M")
    cell = build_estimate(subject, EstimateOptions(context_length=512)).cells["full", "bfloat16"]
    run = simulate(subject, MethodPlan(METHOD_BY_KEY["full"], "bfloat16"), 1, 512)
    assert cell.allocated_bytes == pytest.approx(run.allocated_bytes, rel=0.05)
