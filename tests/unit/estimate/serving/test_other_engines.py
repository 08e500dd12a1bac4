"""SGLang's and llama.cpp's budgets, by hand and beside published logs."""

from __future__ import annotations

from dataclasses import replace

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


@pytest.mark.parametrize(
    ("gib", "ranks", "chunk", "graphs"),
    [
        (19, 1, 2048, 8), (19, 4, 2048, 8), (21, 1, 2048, 24), (34, 4, 2048, 80), (35, 3, 4096, 32), (35, 4, 4096, 160),
        (60, 1, 8192, 256), (60, 4, 8192, 512), (157, 1, 8192, 256), (158, 1, 16384, 512), (158, 4, 16384, 512),
    ],
)  # fmt: skip
def test_sglang_chooses_its_limits_by_the_gpu(gib: int, ranks: int, chunk: int, graphs: int) -> None:
    found = sglang.choose_sglang_defaults(load_served_model("qwen2.5-7b"), gib << 30, ranks, has_images=True)
    assert (found.chunked_prefill_size, found.max_graph_batch) == (chunk, graphs)


@pytest.mark.parametrize(
    ("name", "gib", "ranks", "chunk", "reserved"),
    [
        # Sizes of piecewise graphs up to 2,048, 4,096 and 8,192 tokens: 8 + 14 + 8 + 8 + 4, 8 more, 8 more.
        ("qwen2.5-7b", 24, 1, None, 512 + 2048 * 1.5 + 2 * 24 + 128 + 8 * 42),
        ("qwen2.5-7b", 24, 2, 1024, 512 + 2048 * 1.5 + 2 * 24 + 256 + 8 * 38),  # no less than 2,048 tokens
        ("qwen2.5-7b", 48, 4, None, 512 + 4096 * 1.5 + 2 * 160 + 512 + 8 * 50),
        ("qwen2.5-7b", 79, 1, None, 512 + 8192 * 1.5 + 2 * 256 + 128 + 8 * 58),
        ("qwen2.5-7b", 79, 1, 512, 10 * 1024),  # no less on a large GPU
        ("deepseek-v3", 79, 1, None, 512 + 8192 * 1.5 + 2 * 256 + 128 + 1536),
    ],
)
def test_sglang_reserves_what_its_fraction_leaves(
    name: str, gib: int, ranks: int, chunk: int | None, reserved: float
) -> None:
    found = sglang.choose_sglang_defaults(load_served_model(name), gib << 30, ranks, has_images=True, chunk=chunk)
    assert found.fraction == pytest.approx(1 - reserved / (gib * 1024 * 1.015), abs=0.0006)


def test_sizes_of_piecewise_graphs() -> None:
    limits = (3, 4, 32, 47, 48, 256, 287, 288, 512, 575, 576, 1024, 1279, 1280, 4096, 4607, 4608, 5120)
    counts = [0, 1, 8, 8, 9, 22, 22, 23, 30, 30, 31, 38, 38, 39, 50, 50, 51, 52]
    assert [sglang._count_piecewise_sizes(limit) for limit in limits] == counts


@pytest.mark.parametrize(
    ("layers", "hidden", "share"),
    # 24 layers of 1,024 are 1: a tenth less for each 1 more, and no more than 1.05 nor less than 0.8 of 0.95.
    [(24, 1024, 0.95), (36, 1024, 0.95 * 0.95), (24, 2048, 0.95 * 0.8), (12, 1024, 0.95 * 1.05), (1, 32, 0.95 * 1.05)],
)
def test_sglang_leaves_more_to_large_image_encoders(layers: int, hidden: int, share: float) -> None:
    model = load_served_model("google/gemma-3-27b-it")
    assert model.images is not None
    model = replace(model, images=replace(model.images, layers=layers, hidden=hidden))
    alone, beside = (
        sglang.choose_sglang_defaults(model, 40 << 30, 1, has_images=has_images) for has_images in (False, True)
    )
    assert beside.fraction == pytest.approx(alone.fraction * share)


def test_the_pool_of_sglang_is_its_fraction_less_weights() -> None:
    options = ServingOptions(utilization=0.8, total_bytes=24 * GIB, free_bytes=20 * GIB, context_length=4096)
    model = load_served_model("qwen2.5-7b")
    found = sglang.compute_sglang_budget(model, find_gpu("rtx-4090"), options)
    weights, rate = found.weights_bytes or 0, 28 * 2 * 4 * 128 * 2
    cache = int(24 * GIB * 0.8) - round(4 * GIB * 0.8) - weights
    assert (found.outside_torch_bytes, found.kv_cache_bytes) == (round(4 * GIB * 0.8), cache)
    assert found.num_tokens == found.longest_context == cache // rate
    assert found.concurrency == cache // rate / 4096
    margin = round(0.06 * (cache // rate)) + round(0.15 * GIB / rate)
    assert (found.num_tokens_low, found.num_tokens_high) == (cache // rate - margin, cache // rate + margin)
    less = sglang.compute_sglang_budget(model, find_gpu("rtx-4090"), replace(options, free_bytes=weights - 1))
    assert less.refusal.startswith("CUDA out of memory: weights of")
    more = sglang.compute_sglang_budget(model, find_gpu("rtx-4090"), ServingOptions(total_bytes=80 * GIB))
    assert more.longest_context == model.max_positions < (more.num_tokens or 0)


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


def test_sglang_runs_on_a_t4() -> None:
    found = sglang.compute_sglang_budget(
        load_served_model("qwen3-0.6b"), find_gpu("t4"), ServingOptions(kv_cache_dtype="fp8", tensor_parallel=2)
    )
    assert found.starts and (found.engine, found.release, found.model) == ("sglang", "0.5.13", "qwen3-0.6b")
    assert (found.gpu, found.tensor_parallel, found.dtype) == ("t4", 2, "bfloat16")
    assert (found.quantization, found.kv_cache_dtype, found.block_size) == (None, "fp8", 1)
    assert (found.context_length, found.max_num_batched_tokens, found.max_num_seqs) == (40960, 2048, None)
    assert (found.total_bytes, found.concurrency) == (find_gpu("t4").total_bytes, (found.num_tokens or 0) / 40960)


@pytest.mark.parametrize("release", ["banana", "0.3.2", "1.0"])
def test_other_releases_of_sglang_are_errors(release: str) -> None:
    with pytest.raises(UsageError, match="release of SGLang"):
        sglang.compute_sglang_budget(
            load_served_model("qwen3-0.6b"), find_gpu("rtx-4090"), ServingOptions(release=release)
        )


def test_sglang_refuses_a_fraction_that_is_less_than_the_weights() -> None:
    """They need theirs and that of 512 tokens of 128 KiB."""
    options = ServingOptions(utilization=0.5, context_length=4096, free_bytes=20 * GIB)
    budget = sglang.compute_sglang_budget(load_served_model("llama-3.1-8b"), find_gpu("rtx-4090"), options)
    least = ((budget.weights_bytes or 0) + 64 * MIB) / (20 * GIB)
    assert budget.refusal.endswith(f"it is 0.5; weights alone need {least:.3f})") and budget.num_tokens == 0


def test_sglang_keeps_states_beside_the_cache() -> None:
    """0.9 bytes of states for each of the cache."""
    options = ServingOptions(utilization=0.8, total_bytes=24 * GIB, free_bytes=24 * GIB)
    budget = sglang.compute_sglang_budget(load_served_model("Qwen/Qwen3.5-4B"), find_gpu("rtx-4090"), options)
    pool = int(24 * GIB * 0.8) - (budget.weights_bytes or 0)
    assert budget.starts and budget.kv_cache_bytes == pool - int(pool * 0.9 / 1.9)
    assert any(f"{pool * 0.9 / 1.9 / GIB:.2f} GiB of the pool hold states" in text for text in budget.assumptions)


@pytest.mark.parametrize(
    ("model", "gguf_type", "mib"),
    [("llama-3.1-8b", "q4_k_m", 4403.49), ("qwen2.5-7b", "q4_k_m", 4168.09), ("llama-3.1-8b", "q8_0", 7605.33)],
)
def test_llama_cpp_buffers(model: str, gguf_type: str, mib: float) -> None:
    # The sizes that llama.cpp prints as "CUDA0 model buffer size" for these files.
    budget = compute_llama(model, quantization=gguf_type, context_length=8192)
    assert (budget.weights_bytes or 0) / MIB == pytest.approx(mib, abs=0.01)


@pytest.mark.parametrize(
    ("gguf_type", "bits", "gigabytes"),
    [
        ("q4_0", 4.5, 4.66),
        ("q4_k_s", 4.5, 4.69),
        ("q4_k_m", 4.5, 4.92),
        ("q5_k_m", 5.5, 5.73),
        ("q6_k", 6.5625, 6.60),
        ("q8_0", 8.5, 8.54),
        ("f16", 16, 16.07),
        ("bf16", 16, 16.07),
    ],
)
def test_files_of_llama_cpp_are_as_large_as_published_ones(gguf_type: str, bits: float, gigabytes: float) -> None:
    """Files of Llama 3.1 8B Instruct (huggingface.co, bartowski/Meta-Llama-3.1-8B-Instruct-GGUF): they also have the
    embedding, in the type of most matrices."""
    budget = compute_llama("llama-3.1-8b", quantization=gguf_type, context_length=256, total_bytes=80 * GIB)
    embedding = 128256 * 4096 * bits / 8
    assert ((budget.weights_bytes or 0) + embedding) / 1e9 == pytest.approx(gigabytes, rel=0.01)


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
    """Of 36 layers with 128 experts of 3 x 2,880 x 2,880 in MXFP4 as many as are too large for the GPU."""
    model = load_served_model("gpt-oss-120b")
    layer = 128 * 3 * 2880 * 2880 * 17 // 32
    cached = 36 * 2 * 8 * 64 * 2 * 8192
    fixed = 201088 * 2880 * 34 // 32 + round(0.45 * GIB) + 512 * (201088 + 2880) * 4
    whole = sum(llama_cpp._list_layer_bytes(model, "mxfp4")) + cached + fixed
    for count in (1, 2, 36):
        for total, shown in ((whole - count * layer, count), (whole - count * layer - 1, count + 1)):
            smaller, *moved = compute_llama("gpt-oss-120b", context_length=8192, total_bytes=total).changes
            assert (smaller.kv_cache_bytes, smaller.num_tokens) == (cached * 17 // 32, 8192)
            assert [(one.flag, one.kv_cache_bytes, one.num_tokens) for one in moved] == [
                (f"--n-cpu-moe {shown}", cached, 8192)
            ] * (shown <= 36)
    assert len(compute_llama("gpt-oss-120b", context_length=8192, total_bytes=whole).changes) == 1


def test_llama_cpp_keeps_what_several_requests_have() -> None:
    found = compute_llama("llama-3.1-8b", context_length=1024, concurrency=4, kv_cache_dtype="q4_0")
    assert (found.kv_cache_bytes, found.num_tokens) == (32 * 2 * 8 * 128 * 4096 * 18 // 32, 4096)
    assert found.command.endswith("--ctx-size 4096 --n-gpu-layers 999 --parallel 4 --flash-attn on "
                                  "--cache-type-k q8_0 --cache-type-v q8_0")  # fmt: skip
    assert (found.concurrency, found.max_num_seqs, found.changes) == (4.0, 4, ())
    assert (found.engine, found.model, found.gpu) == ("llama.cpp", "llama-3.1-8b", "rtx-4090")
    assert (found.utilization, found.max_num_batched_tokens, found.requested_concurrency) == (1.0, 512, 4)
    assert (found.kv_cache_dtype, found.quantization, found.context_length) == ("q4_0", "q4_k_m", 1024)
    layer, room = 32, find_gpu("rtx-4090").total_bytes - round(0.45 * GIB)
    left = room - (found.weights_bytes or 0) - (found.profile_peak_bytes or 0)
    assert found.longest_context == min(int(left // (layer * 2 * 8 * 128 * 18 / 32)), 131072)
    none = compute_llama("llama-3.1-8b", total_bytes=GIB)
    assert none.refusal == "no layer fits beside its 4,096 tokens of cache" and "--n-gpu-layers 0" in none.command
    state = compute_llama("Qwen/Qwen3.5-4B", context_length=1024, concurrency=2)
    one = load_served_model("Qwen/Qwen3.5-4B").state
    assert one is not None and state.kv_cache_bytes == 8 * 2 * 4 * 256 * 2 * 2048 + 2 * 24 * one.count_bytes(1, 4)


@pytest.mark.parametrize(("count", "more"), [(8, [0, 3, 6, 7]), (16, [0, 1, 4, 7, 10, 13, 14, 15]), (4, [2, 3])])
def test_layers_with_more_bits(count: int, more: list[int]) -> None:
    """The first and the last eighth, and each third between (llama-quant.cpp, use_more_bits)."""
    assert [index for index in range(count) if llama_cpp._has_more_bits(index, count)] == more


def test_llama_cpp_knows_its_types_of_files() -> None:
    with pytest.raises(UsageError, match="gguf-type"):
        compute_llama("llama-3.1-8b", quantization="q1_k")
