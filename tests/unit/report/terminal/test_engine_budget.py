"""The budget of an engine as text: the answer first, on one screen."""

from __future__ import annotations

import pytest

from memprof.device.catalog import find_gpu
from memprof.estimate.serving.options import ServingOptions
from memprof.flows.recommend.engine import recommend_engine
from memprof.report.terminal.engine_budget import render_budget_table, render_engine_budget
from memprof.serving.budget import LOG, RUN, BudgetChange, EngineBudget
from memprof.units import GIB


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp"])
@pytest.mark.parametrize("model", ["qwen2.5-7b", "llama-3.1-70b", "google/gemma-3-27b-it"])
def test_one_screen(engine: str, model: str) -> None:
    options = ServingOptions(context_length=8192, concurrency=4)
    lines = render_engine_budget(recommend_engine(engine, model, find_gpu("rtx-4090"), options)).splitlines()
    commands = [i for i, line in enumerate(lines) if line.startswith(("Start it", "What starts"))]
    assert len(lines) <= 40
    assert max(len(line) for i, line in enumerate(lines) if i - 1 not in commands) <= 100 + 20
    assert lines[0].startswith(engine)


def test_the_answer_alone() -> None:
    budget = EngineBudget(engine="vllm", model="m", gpu="g", num_tokens=96, concurrency=1.5, context_length=64)
    assert render_engine_budget(budget, quiet=True) == (
        "vllm starts m on g: 96 tokens of KV cache, 1.50 requests of 64 tokens at once.\n"
    )


def test_a_refusal_is_the_answer() -> None:
    budget = EngineBudget(engine="vllm", tensor_parallel=2, gpu="g", refusal="no room", command="vllm serve m")
    text = render_engine_budget(budget)
    assert text.startswith("vllm does not start on 2 x g: no room\n")
    assert "What starts as requested:\n  vllm serve m" in text


def test_requests_that_do_not_fit_are_named() -> None:
    budget = EngineBudget(engine="vllm", num_tokens=96, concurrency=1.5, context_length=64, requested_concurrency=2)
    assert "of 2 requested" in render_engine_budget(budget, quiet=True)


def test_a_log_lacks_rows() -> None:
    budget = EngineBudget(engine="vllm", source=LOG, weights_bytes=GIB, kv_cache_bytes=2 * GIB, graph_taken_bytes=GIB)
    table = render_budget_table(budget)
    assert [line.split("  ")[0] for line in table.splitlines()] == [
        "one GPU, by the engine's log", "- weights", "CUDA graphs", "= KV cache"
    ]  # fmt: skip


def test_changes_by_a_run_are_marked() -> None:
    change = BudgetChange("--flag 1", GIB, 200, RUN, "a cost")
    text = render_engine_budget(EngineBudget(engine="vllm", num_tokens=100, changes=(change,)))
    assert "a cost (by a run)" in text and "+100" in text
