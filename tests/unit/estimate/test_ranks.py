"""The closed form of one rank of several, against simulated ranks and against counting."""

from __future__ import annotations

import gc

import pytest

from memprof.errors import UsageError
from memprof.estimate.geometry import build_from_model
from memprof.estimate.methods import METHOD_BY_KEY, MethodPlan
from memprof.estimate.options import EstimateOptions
from memprof.estimate.table import build_estimate, find_highest_cell
from tests.benchmarks.estimate_ranks import MODELS, PLANS, Case, cases, measure
from tests.lanes import by_day

FULL = MethodPlan(METHOD_BY_KEY["full"], "bfloat16")


def case(model: str, plan: str) -> Case:
    """That of the benchmark."""
    return next(iter(cases([model], [plan])))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan"),
    by_day([("llama-3.2-1b", "fsdp"), ("qwen3-0.6b", "tp=2"), ("llama-3.2-1b", "pp=4:1f1b")], ("llama-3.2-1b", "fsdp")),
)
def test_simulated_ranks(model, plan):
    row = measure(case(model, plan))
    gc.collect()
    assert row is not None and abs(row.error) < 0.04, row


def test_the_benchmark_is_of_many_models_and_plans():
    assert len(MODELS) >= 12 and len(PLANS) >= 6
    assert len(cases(MODELS, [plan for plan, _ in PLANS])) == len(MODELS) * len(PLANS)


def test_shards_are_parts_of_the_whole():
    """Parameters, gradients and state of all ranks together are those of one GPU."""
    subject = build_from_model("llama-3.1-8b")
    alone = find_highest_cell(subject, FULL, 1, 1024, "", 1).moments[-1].terms
    sharded = find_highest_cell(subject, FULL, 1, 1024, "fsdp", 8).moments[-1].terms
    for name in ("parameters", "optimizer state", "gradients", "temporaries"):
        assert sharded[name] == pytest.approx(alone[name] / 8, rel=1e-6)


def test_a_chunked_loss_takes_less():
    subject = build_from_model("llama-3.2-1b")
    chunked = MethodPlan(METHOD_BY_KEY["full-checkpointing"], "bfloat16", chunked_loss=True)
    whole = MethodPlan(METHOD_BY_KEY["full-checkpointing"], "bfloat16")
    sizes = [find_highest_cell(subject, plan, 4, 4096, "fsdp", 8).allocated_bytes for plan in (chunked, whole)]
    assert sizes[0] < sizes[1] / 2


def test_a_plan_is_a_column_of_the_estimate():
    subject = build_from_model("llama-3.1-8b")
    answer = build_estimate(subject, EstimateOptions(gpus=4, parallel="tp=2,fsdp=2"))
    assert {cell.strategy for cell in answer.sharded} == {"tp=2,fsdp=2"}
    assert {cell.method.key for cell in answer.sharded} >= {"full", "full-checkpointing", "mixed"}


@pytest.mark.parametrize(
    ("model", "parallel", "gpus", "problem"),
    [
        ("llama-3.1-8b", "tp=3", 3, "cannot be divided by 3"),
        ("llama-3.1-8b", "pp=64", 64, "have no 64 stages"),
        ("llama-3.1-8b", "fsdp=4", 8, "is for 4 ranks"),
    ],
)
def test_plans_that_cannot_be(model, parallel, gpus, problem):
    with pytest.raises(UsageError, match=problem) as refused:
        find_highest_cell(build_from_model(model), FULL, 1, 1024, parallel, gpus)
    assert refused.value.hint
