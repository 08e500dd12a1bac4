"""SGLang's and llama.cpp's budgets, by hand and beside published logs."""

from __future__ import annotations

import pytest

from memprof.device.catalog import find_gpu
from memprof.errors import UsageError
from memprof.estimate.serving import llama_cpp, sglang
from memprof.estimate.serving.lookup import load_served_model
from memprof.estimate.serving.options import ServingOptions
from memprof.serving.budget import EngineBudget
from memprof.units import GIB, MIB


def compute_llama(model: str, gpu: str = "rtx-4090", **options: object) -> EngineBudget:
    chosen = ServingOptions(**options)  # type: ignore[arg-type]
    return llama_cpp.compute_llama_cpp_budget(load_served_model(model), find_gpu(gpu), chosen)


# Published logs: model, GPUs, dtype, ratio of windowed tokens, free before and after loading, fraction, tokens.
SGLANG_LOGS = [
    ("Qwen/Qwen2.5-1.5B-Instruct", 1, "auto", 0.8, 112.26, 108.97, 0.4, 1_556_049),
    ("Qwen/Qwen2.5-1.5B-Instruct", 1, "nvfp4", 0.8, 112.22, 109.0, 0.4, 5_539_718),
    ("google/gemma-4-E4B-it", 1, "auto", 0.8, 111.41, 95.73, 0.72, 805_556),
    ("google/gemma-3-27b-it", 1, "fp8_e4m3", 0.8, 111.26, 58.77, 0.6, 72_326),
    ("google/gemma-4-26B-A4B-it", 2, "auto", 0.0625, 23.06, 13.71, 0.85, 652_652),
]  # fmt: skip


@pytest.mark.parametrize(("model", "ranks", "dtype", "ratio", "before", "after", "fraction", "tokens"), SGLANG_LOGS)
def test_sglang_pools_of_published_logs(
    model: str, ranks: int, dtype: str, ratio: float, before: float, after: float, fraction: float, tokens: int
) -> None:
    rate = sglang.count_pool_token_bytes(load_served_model(model), ranks, dtype, ratio)
    assert (after - before * (1 - fraction)) * GIB / rate == pytest.approx(tokens, rel=0.015)


def test_sglang_chooses_its_fraction_by_the_gpu() -> None:
    model = load_served_model("qwen2.5-7b")
    small = sglang.choose_sglang_defaults(model, 24 << 30, 1, has_images=True)
    large = sglang.choose_sglang_defaults(model, 79 << 30, 1, has_images=True)
    assert (small.chunked_prefill_size, small.max_graph_batch) == (2048, 24)
    assert (large.chunked_prefill_size, large.max_graph_batch) == (8192, 256)
    mib = (79 << 10) * 1.015
    assert large.fraction == pytest.approx(1 - (512 + 8192 * 1.5 + 512 + 128 + 8 * 58) / mib, abs=0.001)


@pytest.mark.parametrize(
    ("gpu", "options", "message"),
    [
        ("v100-16gb", {}, "SGLang only supports sm75"),
        ("rtx-4090", {"context_length": 100_000}, "greater than the derived context_length (40960)"),
        ("rtx-4090", {"max_num_batched_tokens": 10**9}, "--chunked-prefill-size"),
    ],
)
def test_sglang_refuses_what_it_checks_first(gpu: str, options: dict[str, int], message: str) -> None:
    chosen = ServingOptions(**options)  # type: ignore[arg-type]
    budget = sglang.compute_sglang_budget(load_served_model("qwen3-0.6b"), find_gpu(gpu), chosen)
    assert message in budget.refusal


@pytest.mark.parametrize("release", ["banana", "0.3.2", "1.0"])
def test_other_releases_of_sglang_are_errors(release: str) -> None:
    with pytest.raises(UsageError, match="release of SGLang"):
        sglang.compute_sglang_budget(
            load_served_model("qwen3-0.6b"), find_gpu("rtx-4090"), ServingOptions(release=release)
        )


def test_sglang_refuses_a_fraction_that_is_less_than_the_weights() -> None:
    options = ServingOptions(utilization=0.5, context_length=4096)
    budget = sglang.compute_sglang_budget(load_served_model("llama-3.1-8b"), find_gpu("rtx-4090"), options)
    assert "increase --mem-fraction-static" in budget.refusal and budget.num_tokens == 0


def test_sglang_keeps_states_beside_the_cache() -> None:
    options = ServingOptions(context_length=4096)
    budget = sglang.compute_sglang_budget(load_served_model("Qwen/Qwen3.5-4B"), find_gpu("rtx-4090"), options)
    assert budget.starts and any("states of linear attention" in text for text in budget.assumptions)


@pytest.mark.parametrize(
    ("model", "gguf_type", "mib"),
    [("llama-3.1-8b", "q4_k_m", 4403.49), ("qwen2.5-7b", "q4_k_m", 4168.09), ("llama-3.1-8b", "q8_0", 7605.33)],
)
def test_llama_cpp_buffers(model: str, gguf_type: str, mib: float) -> None:
    # The sizes that llama.cpp prints as "CUDA0 model buffer size" for these files.
    budget = compute_llama(model, quantization=gguf_type, context_length=8192)
    assert (budget.weights_bytes or 0) / MIB == pytest.approx(mib, abs=0.01)


def test_llama_cpp_cache_and_compute_buffer() -> None:
    budget = compute_llama("llama-3.1-8b", context_length=8192)
    assert ((budget.kv_cache_bytes or 0) / MIB, (budget.profile_peak_bytes or 0) / MIB) == (1024.0, 258.5)
    assert budget.command == "llama-server --model llama-3.1-8b.gguf --ctx-size 8192 --n-gpu-layers 999"
    halved = compute_llama("llama-3.1-8b", context_length=8192, kv_cache_dtype="fp8")
    assert (halved.kv_cache_bytes or 0) / MIB == 1024 * 17 / 32


def test_llama_cpp_puts_what_does_not_fit_on_the_cpu() -> None:
    budget = compute_llama("llama-3.1-70b", context_length=8192)
    assert budget.starts and "of 80 layers" in (budget.quantization or "")
    used = (budget.weights_bytes or 0) + (budget.kv_cache_bytes or 0) + (budget.profile_peak_bytes or 0)
    room = (budget.total_bytes or 0) - (budget.outside_torch_bytes or 0)
    assert 0 <= room - used < 0.6 * GIB  # Less than another layer.


def test_llama_cpp_names_the_layers_whose_experts_go_to_the_cpu() -> None:
    flags = [change.flag for change in compute_llama("gpt-oss-120b", context_length=8192).changes]
    assert any(flag.startswith("--n-cpu-moe ") for flag in flags)


def test_llama_cpp_knows_its_types_of_files() -> None:
    with pytest.raises(UsageError, match="gguf-type"):
        compute_llama("llama-3.1-8b", quantization="q1_k")
