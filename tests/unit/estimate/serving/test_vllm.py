"""vLLM's budget: its sum, refusals, what to change, and the command that starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memprof.device.catalog import find_gpu
from memprof.errors import UsageError
from memprof.estimate.serving.changes import VLLM_FLAGS, complete_budget
from memprof.estimate.serving.lookup import load_served_model
from memprof.estimate.serving.lora import count_lora_bytes
from memprof.estimate.serving.options import ServingOptions
from memprof.estimate.serving.vllm import compute_vllm_budget
from memprof.flows.recommend.engine import recommend_engine
from memprof.serving.budget import EngineBudget
from memprof.units import GIB


def compute(model: str, gpu: str, **options: object) -> EngineBudget:
    return compute_vllm_budget(load_served_model(model), find_gpu(gpu), ServingOptions(**options))  # type: ignore[arg-type]


def complete(model: str, gpu: str, **options: object) -> EngineBudget:
    served, device, chosen = load_served_model(model), find_gpu(gpu), ServingOptions(**options)  # type: ignore[arg-type]

    def again(changed: ServingOptions) -> EngineBudget:
        return compute_vllm_budget(served, device, changed)

    return complete_budget(again(chosen), chosen, again, device, VLLM_FLAGS, served.hf_id)


def test_the_cache_is_what_the_others_leave() -> None:
    budget = compute("qwen2.5-7b", "rtx-4090", context_length=8192)
    parts = (budget.weights_bytes, budget.outside_torch_bytes, budget.profile_peak_bytes, budget.graph_bytes)
    assert budget.budget_bytes is not None and None not in parts
    assert budget.kv_cache_bytes == budget.budget_bytes - sum(part or 0 for part in parts)
    assert budget.starts and budget.num_tokens == 16 * (budget.num_blocks or 0)
    assert (budget.num_tokens_low or 0) < budget.num_tokens < (budget.num_tokens_high or 0)


def test_slots_of_adapters_are_among_the_weights() -> None:
    plain = compute("qwen2.5-7b", "rtx-4090", context_length=8192)
    for rank, options in ((16, {}), (8, {"max_lora_rank": 8})):
        budget = compute("qwen2.5-7b", "rtx-4090", context_length=8192, max_loras=2, **options)
        slots = count_lora_bytes(load_served_model("qwen2.5-7b"), 2, rank, 1)
        assert (budget.weights_bytes or 0) - (plain.weights_bytes or 0) == slots
        assert f"{slots / GIB:.2f} GiB of the weights are slots" in budget.assumptions[-2]
        assert (budget.graph_bytes or 0) > (plain.graph_bytes or 0)


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({"context_length": 8192}, (256, 2048, 8192)),
        ({"context_length": 4}, (256, 1024, 4)),  # no more tokens than all requests have
        ({"context_length": 4, "max_num_batched_tokens": 100}, (100, 100, 4)),
        ({"context_length": 4, "max_num_seqs": 8}, (8, 32, 4)),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, (8, 4, 131072)),
        ({}, (256, 2048, 131072)),
    ],
)
def test_limits_of_a_step(options: dict[str, int], limits: tuple[int, int, int]) -> None:
    budget = compute("qwen2.5-7b", "rtx-4090", **options)
    assert (budget.max_num_seqs, budget.max_num_batched_tokens, budget.context_length) == limits


def test_a_budget_by_hand() -> None:
    budget = compute(
        "qwen2.5-7b", "rtx-4090", context_length=8192, total_bytes=24 * GIB, outside_torch_bytes=GIB, is_eager=True,
        utilization=0.9, release="0.19.0",
    )  # fmt: skip
    available = int(24 * GIB * 0.9) - (budget.weights_bytes or 0) - GIB - (budget.profile_peak_bytes or 0)
    block = 28 * 2 * 16 * 4 * 128 * 2
    assert (budget.kv_cache_bytes, budget.num_blocks) == (available, available // block)
    tokens = int(available // block / 512 * 8192)
    margin = round(0.06 * tokens) + round(0.15 * GIB / (block / 16))
    assert (budget.num_tokens_low, budget.num_tokens, budget.num_tokens_high) == (
        tokens - margin, tokens, tokens + margin,
    )  # fmt: skip
    assert (budget.concurrency, budget.graph_bytes) == (available // block / 512, None)
    assert (budget.engine, budget.release, budget.model, budget.gpu) == ("vllm", "0.19.0", "qwen2.5-7b", "rtx-4090")
    assert (budget.tensor_parallel, budget.dtype, budget.quantization) == (1, "bfloat16", None)
    assert (budget.kv_cache_dtype, budget.block_size, budget.utilization) == ("auto", 16, 0.9)
    assert (budget.total_bytes, budget.outside_torch_bytes, budget.profile_peak_reason[:7]) == (
        24 * GIB,
        GIB,
        "sampler",
    )
    assert budget.longest_context == available // block * 16
    # Its rules, the GPU, memory outside torch, the sampler, adapters, blocks.
    begins = ["Rules of vLLM", "Nothing else", "Memory outside", "The sampler", "No slots", "The block size"]
    assert [text[: len(begin)] for begin, text in zip(begins, budget.assumptions, strict=True)] == begins
    amd = compute("qwen2.5-7b", "mi300x", context_length=8192).assumptions
    assert amd[0].startswith("On AMD GPUs") and len(amd) == 1 + len(begins)


@pytest.mark.parametrize(
    ("gpu", "block_size"), [("a100-80gb", 16), ("l40s", 16), ("h100-80gb", 64), ("b200", 64), ("rtx-5090", 16)]
)
def test_blocks_of_latent_vectors_are_larger_where_flashmla_runs(gpu: str, block_size: int) -> None:
    assert compute("deepseek-v2-lite", gpu, context_length=1024).block_size == block_size
    assert compute("qwen2.5-7b", gpu, context_length=1024, block_size=32).block_size == 32


def test_prefixes_are_cached_and_images_profiled_unless_that_is_switched_off() -> None:
    """With prefix caching, a request has two states in each layer that keeps one."""
    plain = compute("Qwen/Qwen3.5-4B", "l4", context_length=4096)
    assert plain == compute("Qwen/Qwen3.5-4B", "l4", context_length=4096, prefix_caching=True, profiles_images=True)
    without = compute("Qwen/Qwen3.5-4B", "l4", context_length=4096, prefix_caching=False)
    assert (without.concurrency or 0) > (plain.concurrency or 0) and without.kv_cache_bytes == plain.kv_cache_bytes
    text = compute("Qwen/Qwen3.5-4B", "l4", context_length=4096, profiles_images=False)
    assert (text.weights_bytes or 0) < (plain.weights_bytes or 0)


def test_a_published_log() -> None:
    total = int(79.19 * GIB)
    budget = compute(
        "llama-3.1-8b", "h100-80gb", release="0.19.0", utilization=0.95, context_length=8192, total_bytes=total
    )
    assert (budget.num_tokens, budget.num_blocks) == (pytest.approx(476_000, rel=1e-3), pytest.approx(29_751, rel=1e-3))
    assert budget.graph_bytes is None  # 0.19 only announces that it will subtract them.


@pytest.mark.parametrize(
    ("model", "gpu", "options", "message"),
    [
        ("qwen3-14b", "rtx-4090", {}, "CUDA out of memory"),
        ("llama-3.1-8b", "rtx-4090", {"utilization": 0.99}, "on startup is less than desired GPU memory utilization"),
        ("llama-3.1-8b", "rtx-4090", {"utilization": 0.5}, "No available memory for the cache blocks"),
        ("llama-3.1-8b", "rtx-4090", {}, "one request of max_model_len 131,072 needs 16.00 GiB"),
        ("qwen3-0.6b", "gtx-1080-ti", {}, "compute capability 6.1"),
        ("qwen3-0.6b", "rtx-4090", {"context_length": 100_000}, "greater than the derived max_model_len (40960)"),
        (
            "qwen3-0.6b", "rtx-4090", {"max_num_seqs": 512, "max_num_batched_tokens": 64},
            "max_num_batched_tokens (64) must be greater than or equal to max_num_seqs (512)",
        ),
    ],
)  # fmt: skip
def test_refusals(model: str, gpu: str, options: dict[str, object], message: str) -> None:
    budget = compute(model, gpu, **options)
    assert not budget.starts and message in budget.refusal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_length": 40_960}, ""),
        ({"context_length": 40_961}, "User-specified max_model_len (40961) is greater than the derived"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 64}, ""),
        ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, "max_num_batched_tokens (64) must be"),
        ({"free_bytes": 12 * GIB}, ""),
        ({"free_bytes": 12 * GIB - 1}, "Free memory on device (12.00/24.00 GiB)"),
    ],
)
def test_edges_of_refusals(options: dict[str, int], message: str) -> None:
    """Of half of 24 GiB: that much must be free."""
    refusal = compute("qwen3-0.6b", "rtx-4090", utilization=0.5, total_bytes=24 * GIB, **options).refusal
    assert refusal.startswith(message) and bool(refusal) == bool(message)


def test_weights_and_profile_run_have_what_is_free() -> None:
    tight = {"utilization": 0.05, "total_bytes": 24 * GIB}
    budget = compute("qwen3-0.6b", "rtx-4090", **tight)
    needed = (budget.weights_bytes or 0) + (budget.profile_peak_bytes or 0)
    enough, less = (compute("qwen3-0.6b", "rtx-4090", free_bytes=needed - few, **tight).refusal for few in (0, 1))
    assert enough.startswith("No available memory") and less.startswith("CUDA out of memory: weights and profile run")


def test_old_releases_are_refused() -> None:
    with pytest.raises(UsageError, match="this release of vLLM"):
        compute("llama-3.1-8b", "h100-80gb", release="0.7.3")


def test_changes_are_computed_anew() -> None:
    budget = complete("qwen2.5-7b", "rtx-4090", context_length=8192)
    by_flag = {change.flag: change for change in budget.changes}
    assert not any("quantization" in flag for flag in by_flag)  # it starts as it is
    fp8 = by_flag["--kv-cache-dtype fp8"]
    assert fp8.num_tokens == compute("qwen2.5-7b", "rtx-4090", context_length=8192, kv_cache_dtype="fp8").num_tokens
    assert [change.num_tokens for change in budget.changes] == sorted(by_flag[f].num_tokens for f in by_flag)[::-1]
    assert budget.command == "vllm serve Qwen/Qwen2.5-7B --max-model-len 8192"
    assert budget.least_gpus == 1


def test_the_command_starts() -> None:
    budget = complete("qwen3-14b", "rtx-4090", context_length=8192)
    assert not budget.starts and budget.least_gpus == 2
    assert budget.command.endswith("--max-model-len 8192 --tensor-parallel-size 2")
    assert compute("qwen3-14b", "rtx-4090", context_length=8192, tensor_parallel=2).starts


def test_what_does_not_start_has_more_gpus_less_precision_or_another_gpu() -> None:
    budget = recommend_engine("vllm", "qwen2.5-7b", find_gpu("t4"), ServingOptions(context_length=8192))
    flags = [change.flag for change in budget.changes]
    assert flags == ["--tensor-parallel-size 2", "--quantization bitsandbytes", "another GPU: a10"]
    assert budget.command.endswith("--tensor-parallel-size 2")  # weights of another precision are not chosen for a user
    four = complete("gemma-3-27b-it", "l4", context_length=8192)
    assert four.least_gpus == 4 and [change.flag for change in four.changes] == ["--tensor-parallel-size 4"]


def test_a_context_that_was_not_asked_for_is_cut() -> None:
    budget = complete("llama-3.1-8b", "rtx-4090")
    assert budget.command == f"vllm serve meta-llama/Llama-3.1-8B --max-model-len {budget.longest_context}"
    assert compute("llama-3.1-8b", "rtx-4090", context_length=budget.longest_context).starts
    assert not compute("llama-3.1-8b", "rtx-4090", context_length=(budget.longest_context or 0) + 16).starts


def test_documents_go_to_json_and_back() -> None:
    budget = complete("qwen2.5-7b", "rtx-4090", context_length=8192)
    assert EngineBudget.from_json(budget.to_json()) == budget
    assert replace(budget, kv_cache_bytes=None).bytes_per_token is None
