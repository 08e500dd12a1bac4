"""Start-up logs of engines as a budget: vLLM, SGLang and llama.cpp, and what follows from their figures."""

from __future__ import annotations

import io

import pytest

from memprof.doctor import diagnose_log
from memprof.doctor.engine_starts import read_engine_start
from memprof.serving.budget import LOG, EngineBudget
from memprof.units import GIB, MIB

VLLM = """\
INFO [api_server.py:1896] vLLM API server version 0.19.0
INFO [core.py:75] Initializing a V1 LLM engine (v0.19.0) with config: model='meta-llama/Llama-3.1-8B-Instruct', \
dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=1, quantization=None, kv_cache_dtype=auto
INFO [gpu_model_runner.py:2007] Model loading took 14.99 GiB and 20.1 seconds
INFO [gpu_worker.py:276] Available KV cache memory: 58.11 GiB
INFO [kv_cache_utils.py:849] GPU KV cache size: 476,000 tokens
INFO [kv_cache_utils.py:853] Maximum concurrency for 8,192 tokens per request: 58.11x
INFO [gpu_model_runner.py:2708] Graph capturing finished in 20 secs, took 0.91 GiB
INFO [gpu_worker.py:600] Free memory on device (78.60/79.19 GiB) on startup. Desired GPU memory utilization is \
(0.95, 75.23 GiB). Actual usage is 14.99 GiB for weight, 1.89 GiB for peak activation, 0.25 GiB for non-torch memory, \
and 0.91 GiB for CUDAGraph memory.
"""
NEWER = """\
INFO Initializing a V1 LLM engine (v0.29.0) with config: model='Qwen/Qwen3.5-4B', tensor_parallel_size=1
INFO Model loading took 8.6 GiB and 2 seconds
INFO Estimated CUDA graph memory: 0.30 GiB total
INFO Available KV cache memory: 9.10 GiB
INFO GPU KV cache size: 267,842 tokens, Maximum concurrency for 32,768 tokens per request: 8.17x
INFO Free memory on device (21.84/22.03 GiB) on startup. Desired GPU memory utilization is (0.92, 20.27 GiB). Actual \
usage is 9.01 GiB for consumed memory (weights + non-torch), 2.17 GiB for peak activation, and 0.24 GiB for CUDAGraph \
memory.
"""
V0 = """\
INFO Loading model weights took 14.96 GB
INFO the current vLLM instance can use total_gpu_memory (79.22GiB) x gpu_memory_utilization (0.90) = 71.30GiB; model \
weights take 14.96GiB; non_torch_memory takes 1.79GiB; PyTorch activation peak memory takes 1.26GiB; the rest of the \
memory reserved for KV Cache is 53.29GiB.
INFO # GPU blocks: 27284, # CPU blocks: 2048
"""
SGLANG_STEPS = """\
server_args=ServerArgs(model_path='google/gemma-4-E4B-it', tp_size=1, mem_fraction_static=0.72)
Load weight begin. avail mem=111.41 GB
Load weight end. elapsed=3.1 s, type=Gemma4, dtype=torch.bfloat16, avail mem=95.73 GB, mem usage=15.67 GB.
KV Cache is allocated. #tokens: 644444, K size: 21.51 GB, V size: 21.51 GB
KV Cache is allocated. #tokens: 805556, K size: 10.76 GB, V size: 10.76 GB
max_total_num_tokens=805556, chunked_prefill_size=8192, max_running_requests=4096, context_len=8192
"""
LLAMA_CPP = """\
load_tensors:   CPU_Mapped model buffer size =   281.81 MiB
load_tensors:        CUDA0 model buffer size =  2200.00 MiB
load_tensors:        CUDA1 model buffer size =  2203.49 MiB
llama_context: n_ctx         = 8192
llama_kv_cache_unified:      CUDA0 KV buffer size =   512.00 MiB
llama_kv_cache_unified:      CUDA1 KV buffer size =   512.00 MiB
llama_context:      CUDA0 compute buffer size =   258.50 MiB
"""


def read(log: str) -> EngineBudget:
    found = read_engine_start(log)
    assert found is not None and found.source == LOG
    return found


CACHE = "Available KV cache memory: 2.00 GiB\n"
CACHED = f"{CACHE}KV cache size: 9 tokens\n"
POOL = "Load weight end. type=X, avail mem=9 GB, mem usage=1.0 GB\n#tokens: 80, KV size: 2.0 GB\n"
BUFFERS = "CUDA0 model buffer size = 1.00 MiB\nCUDA0 KV buffer size = 2.00 MiB\n"


FIELDS = [
        *(
            (CACHE, line, "weights_bytes", GIB)
            for line in ("Model loading took 1.00 GiB", "Loading model weights took 1.00GB",
                         "Actual usage is 1.00 GiB for weight", "model weights take 1.00GiB")
        ),
        *(
            (CACHED, line, "profile_peak_bytes", GIB)
            for line in ("torch peak memory increase: 1.00GiB", "1.00 GiB for peak activation",
                         "activation peak memory takes 1.00GiB")
        ),
        *(
            (CACHED, line, "outside_torch_bytes", GIB)
            for line in ("non-torch forward increase memory: 1.00GiB", "1.00 GiB for non-torch memory",
                         "non_torch_memory takes 1.00GiB")
        ),
        ("# GPU blocks: 9\n", "the rest of the memory reserved for KV Cache is 1.00GiB", "kv_cache_bytes", GIB),
        *(
            (CACHED, line, "total_bytes", GIB)
            for line in ("Free memory on device cuda:0 (-0.50/1.00 GiB)", "total_gpu_memory (1.00GiB)",
                         "a total capacity of 1.00 GiB")
        ),
        (CACHED, "Estimated CUDA graph memory: 1.00 GiB total", "graph_bytes", GIB),
        *(
            (CACHED, line, "graph_taken_bytes", GIB)
            for line in ("Graph capturing finished in 1 sec, took 1.00 GiB", "and 1.00 GiB for CUDAGraph memory")
        ),
        (CACHE, "# cuda blocks: 1,024", "num_tokens", 16384),
        (CACHE, "KV cache size: 9 tokens\nnum_gpu_blocks is: 12", "num_blocks", 12),
        (CACHE, "Maximum concurrency for 1,000 tokens per request: 2.5x", "num_tokens", 2500),
        *(
            (CACHED, line, "context_length", 1000)
            for line in ("concurrency for 1,000 tokens", "max_seq_len=1000", "'max_model_len': 1000")
        ),
        (CACHED, "'tensor_parallel_size': 4", "tensor_parallel", 4),
        (CACHED, "max_num_seqs=4", "max_num_seqs", 4),
        (CACHED, "max_num_batched_tokens=4", "max_num_batched_tokens", 4),
        *(
            (CACHED, line, "utilization", 0.5)
            for line in ("Desired GPU memory utilization is (0.5, 8", "desired GPU memory utilization (0.5, 8 GiB)",
                         "gpu_memory_utilization=0.5", "gpu_memory_utilization (0.5)", "Requested memory: 0.5 (util)")
        ),
        *(
            (CACHED, line, "release", "0.9.1")
            for line in ("LLM engine (v0.9.1)", "vllm==0.9.1")
        ),
        (CACHED, "'model_tag': 'a/b'", "model", "a/b"),
        (CACHED, "'model': 'a/b'", "model", "a/b"),
        (CACHED, "dtype=torch.half", "dtype", "half"),
        (CACHED, "quantization=awq", "quantization", "awq"),
        (CACHED, "quantization=None", "quantization", None),
        (CACHED, "kv_cache_dtype=fp8", "kv_cache_dtype", "fp8"),
        (POOL, "total capacity of 1.00 GiB", "total_bytes", GIB),
        (POOL, "Capture cuda graph end. 3 s. mem usage=1.00 GB", "graph_taken_bytes", GIB),
        (POOL, "context_len=40", "concurrency", 2.0),
        (POOL, "context_length=40", "context_length", 40),
        (POOL, "tp_size=4", "tensor_parallel", 4),
        (POOL, "max_running_requests=4", "max_num_seqs", 4),
        (POOL, "chunked_prefill_size=4", "max_num_batched_tokens", 4),
        (POOL, "Load weight end. dtype=torch.half", "dtype", "half"),
        (POOL, "quantization='awq'", "quantization", "awq"),
        (POOL, "Using KV cache dtype: torch.float8_e4m3fn", "kv_cache_dtype", "float8_e4m3fn"),
        ("Load weight end. mem usage=1.0 GB\n", "max_total_num_tokens=80", "num_tokens", 80),
        *((BUFFERS, f"{name}0 compute buffer size = 3.00 MiB", "profile_peak_bytes", 3 * MIB)
          for name in ("CUDA", "ROCm", "Vulkan", "SYCL", "MTL", "Metal")),
        (BUFFERS, "n_seq_max = 4", "max_num_seqs", 4),
        (BUFFERS, "n_ctx = 4,096", "context_length", 4096),
        (BUFFERS, "general.name str = A B ", "model", "A B"),
        (BUFFERS, "loading model 'a.gguf'", "model", "a.gguf"),
    ]  # fmt: skip


def test_a_line_has_a_field() -> None:
    for rest, line, field, value in FIELDS:
        assert getattr(read(f"{rest}{line}\n"), field) == value


@pytest.mark.parametrize(
    ("cache", "utilization", "changes"),
    [
        ("10.00", "0.94", [("0.95", 10 * GIB + int((0.95 - 0.94) * 100 * GIB))]),
        ("10.00", "0.95", []),
        ("-1.00", "0.50", [("0.52", -GIB + int((0.52 - 0.5) * 100 * GIB))]),  # one hundredth more than is missing
        ("-1.50", "0.50", [("0.53", int(-1.5 * GIB) + int((0.53 - 0.5) * 100 * GIB))]),
        ("-1.00", "0.96", [("0.98", -GIB + int((0.98 - 0.96) * 100 * GIB))]),
        ("-2.00", "0.96", []),
    ],
)
def test_a_larger_fraction_for_more_cache(cache: str, utilization: str, changes: list[tuple[str, int]]) -> None:
    log = f"Model loading took 9 GiB\nAvailable KV cache memory: {cache} GiB\ntotal capacity of 100.00 GiB\n"
    found = read(f"{log}gpu_memory_utilization={utilization}\n").changes
    assert [(one.flag, one.kv_cache_bytes) for one in found] == [
        (f"--gpu-memory-utilization {fraction}", size) for fraction, size in changes
    ]


@pytest.mark.parametrize(("taken", "gained_mib"), [(800, None), (799, 201), (-5, 1000)])
def test_graphs_that_took_200_mib_less_than_was_kept(taken: int, gained_mib: int | None) -> None:
    log = f"{CACHE}KV cache size: 1000 tokens\nEstimated CUDA graph memory: {1000 / 1024} GiB total\n"
    found = read(f"{log}{taken / 1024} GiB for CUDAGraph memory\n").changes
    size = 2 * GIB + (gained_mib or 0) * MIB
    assert [(one.kv_cache_bytes, one.num_tokens) for one in found] == [(size, size * 1000 // (2 * GIB))] * (
        gained_mib is not None
    )


def test_a_start_of_vllm() -> None:
    budget = read(VLLM)
    assert (budget.release, budget.model, budget.num_tokens) == ("0.19.0", "meta-llama/Llama-3.1-8B-Instruct", 476_000)
    assert (budget.context_length, budget.concurrency, budget.utilization) == (8192, 58.11, 0.95)
    sizes = (budget.weights_bytes, budget.profile_peak_bytes, budget.outside_torch_bytes, budget.total_bytes)
    assert sizes == tuple(int(gib * GIB) for gib in (14.99, 1.89, 0.25, 79.19))
    assert (budget.graph_bytes, budget.graph_taken_bytes) == (None, int(0.91 * GIB))
    assert budget.starts and budget.changes == ()  # It has 0.95 already.


def test_newer_releases_print_weights_and_the_rest_together() -> None:
    budget = read(NEWER)
    assert budget.outside_torch_bytes == int(9.01 * GIB) - int(8.6 * GIB)
    assert budget.profile_peak_bytes == int(2.17 * GIB) - int(0.30 * GIB)  # The estimated graphs are in it.
    assert [change.flag for change in budget.changes] == ["--gpu-memory-utilization 0.95"]
    assert budget.changes[0].kv_cache_bytes == int(9.10 * GIB) + int((0.95 - 0.92) * int(22.03 * GIB))


def test_the_engine_before_v1() -> None:
    budget = read(V0)
    assert (budget.kv_cache_bytes, budget.num_blocks, budget.num_tokens) == (int(53.29 * GIB), 27284, 27284 * 16)
    assert (budget.total_bytes, budget.utilization) == (int(79.22 * GIB), 0.9)


def test_a_start_of_sglang_with_two_pools() -> None:
    budget = read(SGLANG_STEPS)
    assert (budget.engine, budget.num_tokens, budget.model) == ("sglang", 805_556, "google/gemma-4-E4B-it")
    assert budget.kv_cache_bytes == int((2 * 21.51 + 2 * 10.76) * GIB)
    assert (budget.utilization, budget.context_length, budget.max_num_seqs) == (0.72, 8192, 4096)


def test_a_start_of_llama_cpp_on_two_gpus() -> None:
    budget = read(LLAMA_CPP)
    assert (budget.engine, budget.num_tokens) == ("llama.cpp", 8192)
    assert (budget.weights_bytes, budget.kv_cache_bytes) == (int(4403.49 * MIB), 1024 * MIB)
    assert budget.profile_peak_bytes == int(258.5 * MIB)


def test_a_negative_cache_is_a_refusal() -> None:
    budget = read("INFO Model loading took 28.48 GiB and 2 s\nINFO Available KV cache memory: -0.53 GiB\n")
    assert budget.refusal == "nothing is left for the KV cache (-0.53 GiB)"


@pytest.mark.parametrize("log", ["", "step 1\n", "INFO Model loading took 14.99 GiB and 20.1 seconds\n"])
def test_other_logs_have_none(log: str) -> None:
    assert read_engine_start(log) is None


def test_a_failed_start_has_both() -> None:
    message = (
        "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (9.97 GiB).\n"
    )
    log = VLLM.partition("INFO [kv_cache_utils")[0] + message
    diagnoses, budget = diagnose_log(io.BytesIO(log.encode()), "server.log")
    assert len(diagnoses) == 1 and budget is not None
    assert budget.refusal == diagnoses[0].title
    assert budget.weights_bytes == int(14.99 * GIB)


@pytest.mark.parametrize(("slots", "fewer"), [(8, 4), (2, 1), (1, None)])
def test_adapters_that_took_the_room(slots: int, fewer: int | None) -> None:
    log = (
        f"INFO non-default args: {{'model': 'x', 'enable_lora': True, 'max_loras': {slots}}}\nValueError: To serve at "
        "least one request with the models's max seq len (4096), "
        "(0.22 GiB KV cache is needed, which is larger than the "
        "available KV cache memory (0.09 GiB). Based on the available memory, the estimated maximum model length is "
        "1664.\n"
    )
    diagnoses, _ = diagnose_log(io.BytesIO(log.encode()), "server.log")
    found = [step for step in diagnoses[0].steps if "--max-loras" in step.command]
    assert [step.command.endswith(f"--max-loras {fewer}") for step in found] == [True] * (fewer is not None)
    assert all(f"; {fewer} instead" in step.what for step in found)


def test_colors_are_no_part_of_a_figure() -> None:
    colored = VLLM.replace("58.11 GiB", "\x1b[1m58.11\x1b[0m GiB").replace("14.99", "\x1b[33m14.99\x1b[0m")
    assert read(colored) == read(VLLM)


def test_the_last_start_counts() -> None:
    later = VLLM.replace("58.11 GiB", "20.00 GiB").replace("476,000", "163,800").replace("took 0.91 GiB", "")
    found = read(VLLM + later)
    assert (found.num_tokens, found.kv_cache_bytes) == (163_800, 20 * GIB)
    assert read(VLLM + VLLM[:60]) == read(VLLM)  # A start that has just begun.


def test_a_start_after_another_program_is_read() -> None:
    log = io.BytesIO(b"step 1 loss 2.3\n" * 60_000 + VLLM.encode())
    diagnoses, budget = diagnose_log(log, "log")
    assert not diagnoses and budget == read(VLLM)


def test_a_draft_model_has_weights_and_a_pool_of_its_own() -> None:
    log = (
        "Load weight end. type=Main, avail mem=80.0 GB, mem usage=57.0 GB.\n"
        "KV Cache is allocated. #tokens: 1000, K size: 5.0 GB, V size: 5.0 GB\n"
        "Load weight end. type=Draft, avail mem=70.0 GB, mem usage=2.0 GB.\n"
        "KV Cache is allocated. #tokens: 1000, K size: 0.5 GB, V size: 0.5 GB\n"
    )
    for text in (log, "".join(f"[TP{rank}] {line}\n" for line in log.splitlines() for rank in (1, 0))):
        found = read(text)
        assert (found.weights_bytes, found.kv_cache_bytes, found.num_tokens) == (59 * GIB, 11 * GIB, 1000)


def test_a_pool_of_latent_vectors_has_one_size() -> None:
    found = read(SGLANG_STEPS.replace("K size: 10.76 GB, V size: 10.76 GB", "KV size: 17.00 GB"))
    assert found.kv_cache_bytes == int((2 * 21.51 + 17.0) * GIB)
