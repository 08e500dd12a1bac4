"""The closed form against the virtual GPU: a sample of `python -m tests.benchmarks.estimate`, and what it states."""

import pytest

from memprof.catalog import custom_gpu
from memprof.device.context import CONTEXT_BYTES
from memprof.estimate.geometry import from_model, from_params
from memprof.estimate.methods import BY_KEY, Plan
from memprof.estimate.table import FITS, NO, build_estimate
from memprof.flows.estimate import simulate

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


@pytest.mark.parametrize(("model", "method", "dtype", "batch_size", "context_length"), SAMPLE)
def test_within_the_stated_band(model, method, dtype, batch_size, context_length):
    subject = from_model(model)
    cell = build_estimate(subject, context_length=context_length, batch_size=batch_size).cells[method, dtype]
    run = simulate(subject, Plan(BY_KEY[method], dtype), batch_size, context_length)
    assert cell.allocated_bytes == pytest.approx(run.allocated_bytes, rel=0.05)
    need, band = cell.device_bytes, cell.band
    assert run.required_bytes <= need * (1 + band.high)
    assert run.allocated_bytes + CONTEXT_BYTES >= need * (1 + band.low)
    # And so no verdict is wrong: a card on which it "fits" has all that is reserved, one with "no" less than is needed.
    assert cell.on(custom_gpu(run.required_bytes - 1)) != FITS
    assert cell.on(custom_gpu(run.required_bytes)) != NO


def test_a_number_of_parameters_is_simulated_in_its_shape():
    subject = from_params("30M")
    cell = build_estimate(subject, context_length=512).cells["full", "bfloat16"]
    run = simulate(subject, Plan(BY_KEY["full"], "bfloat16"), 1, 512)
    assert cell.allocated_bytes == pytest.approx(run.allocated_bytes, rel=0.05)
