"""What the report of an engine's run says where the engine does not start."""

from __future__ import annotations

from dataclasses import replace

from memprof.device.catalog import find_gpu
from memprof.estimate.serving.options import ServingOptions
from memprof.flows.recommend.engine import advise_engine, recommend_engine
from memprof.serving.budget import CLOSED_FORM, RUN, EngineBudget

BUDGET = EngineBudget(
    engine="vllm", release="0.33.0", source=RUN, model="qwen2.5-7b", gpu="t4", context_length=8192, utilization=0.92,
    max_num_seqs=256, max_num_batched_tokens=2048, refusal="CUDA out of memory. Tried to allocate 1.02 GiB.",
)  # fmt: skip


def test_an_engine_whose_weights_do_not_fit_gets_the_closed_form():
    advised = advise_engine(BUDGET)
    assert advised == recommend_engine(
        "vllm", "qwen2.5-7b", find_gpu("t4"), ServingOptions(release="0.33.0", context_length=8192)
    )
    assert advised.source == CLOSED_FORM and advised.least_gpus == 2
    assert "--gpu-memory-utilization" not in advised.command  # as it is the engine's default
    assert "--gpu-memory-utilization 0.9" in advise_engine(replace(BUDGET, utilization=0.9)).command


def test_an_engine_that_refuses_its_cache_keeps_its_own_figures():
    refused = replace(BUDGET, kv_cache_bytes=1 << 20, weights_bytes=14 << 30, refusal="No available memory")
    advised = advise_engine(refused)
    assert (advised.source, advised.weights_bytes, advised.refusal) == (RUN, 14 << 30, "No available memory")
    assert advised.changes and advised.command


def test_what_the_closed_form_does_not_know_is_left():
    for budget in (replace(BUDGET, refusal=""), replace(BUDGET, model="no-such-model"), replace(BUDGET, gpu="24gb")):
        assert advise_engine(budget) is budget
