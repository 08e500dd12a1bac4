"""Options and figures that each engine's advice has, on both sides of every threshold.

A step is written as `NUMBERS > OPTIONS`: the numbers in its text, and its command without what is the same for all.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from memprof.doctor.diagnosis import Cause, EngineFigures, MessageSizes, PrintedSize
from memprof.doctor.engines import ENGINE_SIGNATURES, ENGINES, Engine, EngineError, Stage, find_engine
from memprof.doctor.engines.engine import find_integer, find_number
from memprof.doctor.engines.llama_cpp import LLAMA_CPP, OLLAMA, read_cuda_sizes
from memprof.doctor.engines.sglang import SGLANG, read_host_sizes
from memprof.doctor.engines.tensorrt_llm import TENSORRT_LLM, read_executor_sizes
from memprof.doctor.engines.tgi import TGI
from memprof.doctor.engines.vllm import VLLM, read_budget, read_kv_cache
from memprof.doctor.engines.xla import JAX, TENSORFLOW, TORCH_XLA, read_xla
from memprof.doctor.message_sizes import read_size
from memprof.doctor.tracebacks import TracebackFrame

PROCESSES = "> nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"
# What a command of an engine begins with.
PROGRAM = re.compile(
    r"(?:vllm serve|trtllm-serve|text-generation-launcher --model-id|python -m sglang\.launch_server --model-path"
    r"|llama-server --model) MODEL(?:\.gguf)? |trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE "
)


def size(text: str | None) -> PrintedSize | None:
    return None if text is None else read_size(*text.split())


def advise(
    engine: Engine, log: str = "", message: str = "", cause: Cause = Cause.DEVICE_MEMORY, signature: str = "",
    stage: Stage = Stage.UNKNOWN, device: int | None = None, **sizes: str,
) -> list[str]:  # fmt: skip
    """Return the steps for an error of `engine` with this message in this log; `sizes` are those of the message."""
    found = MessageSizes(device=device, **{name: size(text) for name, text in sizes.items()})  # type: ignore[arg-type]
    error = EngineError(engine, cause, signature, found, engine.read_figures(message, log), log, stage)
    steps = []
    for step in error.list_advice():
        numbers = " ".join(re.findall(r"\d[\d,.]*\d|\d", step.what))
        steps.append(f"{numbers} > {PROGRAM.sub('', step.command)}".strip())
    return steps


KV: dict[str, Any] = {"cause": Cause.KV_CACHE}
BATCH: dict[str, Any] = {"cause": Cause.ENGINE_BATCH}
ENOUGH = {"tried": "1.00 GiB", "free": "1.00 GiB", "total": "80.0 GiB"}  # and yet it failed

# -- vLLM --------------------------------------------------------------------------------------------------------------

NEED = (
    "To serve at least one request with the model's max seq len ({}), (6.00 GiB KV cache is needed, which is larger "
    "than the available KV cache memory (4.00 GiB)"
)
NEEDS: dict[str, Any] = {**KV, "tried": "6.00 GiB", "free": "4.00 GiB"}
NO_CACHE: dict[str, Any] = {**KV, "message": "No available memory for the cache blocks", "signature": "vllm-no-cache"}
DEFAULT = "0.9 0.29 0.92"  # the default of two releases
LOWER = f"0.85 {DEFAULT} > --gpu-memory-utilization 0.85"
WEIGHTS = ["> --tensor-parallel-size 2", "> --quantization fp8"]


@pytest.mark.parametrize(
    ("log", "known", "expected"),
    [
        # 1,000 x 3.995 / 6.005 tokens are 41 blocks of 16. 2.01 GiB are 0.03 of 67.
        ("tensor_parallel_size=2 pipeline_parallel_size=3", {**NEEDS, "message": NEED.format(1000)}, [
            "> --max-model-len 656", "3.00 6.00 > --kv-cache-dtype fp8",
            f"{DEFAULT} 67.00 > --gpu-memory-utilization 0.95", "12 6 > --tensor-parallel-size 4",
        ]),
        ("", {**NEEDS, "message": NEED.format(20)}, [
            "3.00 6.00 > --kv-cache-dtype fp8", f"{DEFAULT} 67.00 > --gpu-memory-utilization 0.95",
            "> --tensor-parallel-size 2",
        ]),
        ("--kv-cache-dtype fp8", {**NEEDS, "message": f"{NEED.format(9)} estimated maximum model length is 13528"}, [
            "> --max-model-len 13528", f"{DEFAULT} 67.00 > --gpu-memory-utilization 0.95", "> --tensor-parallel-size 2",
        ]),
        # 0.5 + 2.01 / 200: as much as the printed sizes may mean.
        ("gpu_memory_utilization=0.5 total_gpu_memory (200.0GiB)", {**NEEDS, "message": NEED.format(1000)}, [
            "> --max-model-len 656", "3.00 6.00 > --kv-cache-dtype fp8",
            "2.00 0.52 0.5 > --gpu-memory-utilization 0.52", "> --tensor-parallel-size 2",
        ]),
        ("", {**KV, "message": "max seq len (1000)"}, ["> --tensor-parallel-size 2"]),
        ("gpu-memory-utilization 0.89", NO_CACHE, [
            "0.89 > --gpu-memory-utilization 0.92", "> --max-num-batched-tokens 1024 --max-num-seqs 64",
            "> --quantization fp8", "> --tensor-parallel-size 2",
        ]),
        # 0.9 + 1.255 / 20; half of the weights is not more than 1.25.
        ("gpu-memory-utilization 0.9 Available KV cache memory: -1.25 GiB Model loading took 2.5 GiB total capacity "
         "of 20 GiB", NO_CACHE, [
            "1.25 0.97 0.9 > --gpu-memory-utilization 0.97", "> --max-num-batched-tokens 1024 --max-num-seqs 64",
            "> --tensor-parallel-size 2",
        ]),
        ("Available KV cache memory: -9 GiB Available KV cache memory: -0.5 GiB Model loading took 2.50 GiB",
         NO_CACHE, [
            f"{DEFAULT} 18.33 > --gpu-memory-utilization 0.95", "> --max-num-batched-tokens 1024 --max-num-seqs 64",
            "1.25 2.50 > --quantization fp8", "> --tensor-parallel-size 2",
        ]),
        ("", {"cause": Cause.ENGINE_BUDGET, "free": "4.10 GiB", "total": "80.0 GiB"}, [
            PROCESSES, "> kill PID", "4.10 > --gpu-memory-utilization 0.05",
        ]),
        ("", {"cause": Cause.ENGINE_BUDGET, "free": "4.00 GiB", "total": "80.0 GiB"}, [PROCESSES, "> kill PID"]),
        ("", {"cause": Cause.ENGINE_BUDGET, "free": "9.00 GiB"}, [PROCESSES, "> kill PID"]),
        ("", {**BATCH, "signature": "vllm-warm-up", "message": "warming up sampler with 7 dummy requests"}, [
            LOWER, "7 > --max-num-seqs 3", "> --enforce-eager",
        ]),
        ("gpu_memory_utilization=0.05", {**BATCH, "signature": "vllm-warm-up", "message":
         "warming up sampler with 1 dummy requests"}, ["> --enforce-eager"]),
        ("warming up sampler x with 2 dummy requests", {**BATCH, "signature": "vllm-warm-up"}, [
            LOWER, "2 > --max-num-seqs 1", "> --enforce-eager",
        ]),
        # 0.9 - 2 / 80; a quarter of the batch, and no more sequences than tokens.
        ("max_num_batched_tokens=40 max_num_seqs=3", {"stage": Stage.SERVE, "tried": "3.00 GiB", "free": "1.00 GiB",
                                                     "total": "80.0 GiB"}, [
            f"2.00 0.87 {DEFAULT} > --gpu-memory-utilization 0.87", "> --max-num-batched-tokens 10 --max-num-seqs 1",
        ]),
        ("gpu_memory_utilization=0.93 max_num_batched_tokens=3", {"stage": Stage.SERVE, "tried": "3.00 GiB",
                                                                 "free": "1.00 GiB"}, [
            "0.88 0.93 > --gpu-memory-utilization 0.88", "> --max-num-batched-tokens 1 --max-num-seqs 1",
        ]),
        ("", {"stage": Stage.CACHE}, [LOWER, "> --enforce-eager"]),
        ("", {"stage": Stage.CACHE, **ENOUGH}, [LOWER, "> --enforce-eager"]),
        ("", {"stage": Stage.WARM_UP}, [LOWER, "> --enforce-eager"]),
        ("", {"private_pools": "1.00 GiB"}, [LOWER, "> --enforce-eager"]),
        ("when warming up", {}, [LOWER, "> --enforce-eager"]),
        ("GPU KV cache size", {}, [LOWER, "> --enforce-eager"]),
        ("GPU KV cache size", {"stage": Stage.LOAD, "private_pools": "1.00 GiB"}, WEIGHTS),
        ("", {}, WEIGHTS),
        ("quantization=awq", {"stage": Stage.LOAD}, WEIGHTS[:1]),
        ("tensor-parallel-size 2", {"stage": Stage.LOAD}, ["4 2 > --tensor-parallel-size 4", "> --quantization fp8"]),
        ("max-num-seqs 1000", {"stage": Stage.PROFILE}, [
            "> --max-num-batched-tokens 1024 --max-num-seqs 250", *WEIGHTS,
        ]),
    ],
)  # fmt: skip
def test_vllm(log: str, known: dict[str, Any], expected: list[str]) -> None:
    assert advise(VLLM, log, **known) == expected


def test_figures_of_vllm() -> None:
    log = "gpu-memory-utilization 0.7 Available KV cache memory: -3 GiB"
    found = VLLM.read_figures(NEED.format(1000), log)
    assert found.missing is not None
    assert (found.length, found.fraction, found.missing.num_bytes) == (1000, 0.7, 2 << 30)
    assert VLLM.read_figures(NEED.format(9).partition(", which")[0], log).missing is None
    found = VLLM.read_figures("memory utilization (0.85, 3", log)
    assert (found.fraction, found.missing, found.part) == (0.85, None, "")
    found = VLLM.read_figures(
        "max seq len (7) that can be stored in KV cache (5)", "warming up sampler with 9 dummy requests"
    )
    assert (found.length, found.fitting_length, found.part, found.batch) == (7, 5, "sampler", 9)
    sizes = read_budget(
        "Free memory on device cuda:1 (6.93/8.0 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 7.2 GiB)"
    )
    assert sizes == MessageSizes(size("7.2 GiB"), False, 1, size("8.0 GiB"), size("6.93 GiB"))
    assert read_budget("no") == MessageSizes(tried_is_segment=False)
    sizes = read_kv_cache(NEED.format(1000))
    assert (sizes.tried, sizes.free, sizes.tried_is_segment) == (size("6.00 GiB"), size("4.00 GiB"), False)


# -- SGLang ------------------------------------------------------------------------------------------------------------

LOADED = "Load weight end. avail mem=10.00 GB, mem usage=70.00 GB"
SG_WEIGHTS = ["> --tp-size 2", "> --quantization fp8"]
TOKENS: dict[str, Any] = {**KV, "signature": "sglang-tokens"}
LENGTH: dict[str, Any] = {**KV, "signature": "sglang-length"}
LESS = ["> --max-running-requests 32", "> --schedule-conservativeness 1.3"]
HOST = "Requesting 100.00 GB but only have 25.40 GB free"


def exceeds(length: int) -> str:
    return f"Input length ({length} tokens) exceeds the maximum allowed length (2000 tokens)"


ON_SGLANG = [
    (f"{LOADED} tp_size=3", {**KV, "message": "Not enough memory mem_fraction_static=0.8"}, [
        "0.8750 > --mem-fraction-static 0.88", "6 3 > --tp-size 6", "> --quantization fp8",
    ]),
    # The next hundredth leaves 0.005 or more to the cache.
    ("", {**KV, "message": "minimum viable = 1 - available/pre = 0.9151"}, [
        "0.9151 > --mem-fraction-static 0.93", *SG_WEIGHTS,
    ]),
    ("", {**KV, "message": "minimum viable = 1 - available/pre = 0.9610"}, [
        "0.9610 > --mem-fraction-static 0.97", *SG_WEIGHTS,
    ]),
    ("", {**KV, "message": "minimum viable = 1 - available/pre = 0.9660"}, SG_WEIGHTS),
    # Half way from 0.8 to all.
    (LOADED, {**KV, "message": "leave no GPU memory mem_fraction_static=0.8"}, [
        "0.8 > --mem-fraction-static 0.9", *SG_WEIGHTS,
    ]),
    ("quantization=awq", {**KV, "message": "minimum viable = 1 - available/pre = 0.7999 mem_fraction_static=0.8"}, [
        "> --tp-size 2",
    ]),
    ("", {**KV, "message": "minimum viable = 1 - available/pre = 0.8 mem_fraction_static=0.8"}, [
        "0.8000 > --mem-fraction-static 0.81", *SG_WEIGHTS,
    ]),
    (LOADED.replace("70.00", "0.00"), {**KV, "message": "Not enough memory"}, [
        "> --mem-fraction-static 0.95", *SG_WEIGHTS,
    ]),
    ("mem_fraction_static=0.8", {**TOKENS, "message": "Try to allocate 48 tokens"}, [
        *LESS, "> --kv-cache-dtype fp8_e5m2", "> --mem-fraction-static 0.9",
    ]),
    ("mem-fraction-static 0.96 kv_cache_dtype='fp8_e4m3'", TOKENS, LESS),
    ("--kv-cache-dtype fp8 mem_fraction_static=0.95", TOKENS, [*LESS, "> --mem-fraction-static 0.97"]),
    ("--tp 4", {**LENGTH, "message": exceeds(4000)}, [
        "> --kv-cache-dtype fp8_e5m2", "> --mem-fraction-static 0.95", "8 4 > --tp-size 8",
        "> --allow-auto-truncate",
    ]),
    ("", {**LENGTH, "message": exceeds(4001)}, [
        "> --mem-fraction-static 0.95", "> --tp-size 2", "> --allow-auto-truncate",
    ]),
    ("", {"stage": Stage.LOAD}, SG_WEIGHTS),
    ("tp-size 2", {"stage": Stage.LOAD}, ["4 2 > --tp-size 4", "> --quantization fp8"]),
    # 0.88 - 2 / 80
    ("mem_fraction_static=0.88", {"stage": Stage.WARM_UP, "tried": "3.00 GiB", "free": "1.00 GiB",
                                  "total": "80.0 GiB"}, [
        "2.00 0.85 0.88 > --mem-fraction-static 0.85", "> --cuda-graph-max-bs 16", "> --tp-size 2",
    ]),
    ("set cuda-graph-max-bs-decode", {"stage": Stage.WARM_UP}, [
        "0.8 > --mem-fraction-static 0.8", "> --cuda-graph-max-bs-decode 16", "> --tp-size 2",
    ]),
    ("chunked_prefill_size=4096 mem_fraction_static=0.05", {"stage": Stage.SERVE}, [
        "> --chunked-prefill-size 1024", "> --tp-size 2",
    ]),
    ("chunked_prefill_size=2044 mem_fraction_static=0.06", {"stage": Stage.SERVE}, [
        "0.01 0.06 > --mem-fraction-static 0.01", "> --chunked-prefill-size 512", "> --tp-size 2",
    ]),
    *(
        ("", known, ["0.8 > --mem-fraction-static 0.8", "> --chunked-prefill-size 2048", "> --tp-size 2"])
        for known in ({}, ENOUGH)
    ),
    ("--tp 4", {"cause": Cause.HOST_MEMORY, "message": HOST, "free": "25.40 GB"}, [
        "> --enable-hierarchical-cache --hicache-size 6", "> memprof doctor --env",
    ]),
    ("tp_size=30", {"cause": Cause.HOST_MEMORY, "free": "25.40 GB"}, ["> memprof doctor --env"]),
    ("", {"cause": Cause.HOST_MEMORY}, ["> memprof doctor --env"]),
]  # fmt: skip


def test_sglang() -> None:
    for log, known, expected in ON_SGLANG:
        assert advise(SGLANG, log, **known) == expected


def test_figures_of_sglang() -> None:
    """A host pool's GB are 10^9 bytes."""
    sizes = read_host_sizes(HOST)
    assert sizes.tried is not None and sizes.free is not None
    assert (sizes.tried.num_bytes, sizes.free.num_bytes) == (100 * 10**9, 254 * 10**8)
    assert sizes == MessageSizes(sizes.tried, False, free=sizes.free)
    assert read_host_sizes("no") == MessageSizes(tried_is_segment=False)
    found = SGLANG.read_figures(f"{HOST} mem_fraction_static=1.0", "mem_fraction_static=0.5")
    assert (found.part, found.fraction) == ("KV cache in host memory", 1.0)
    assert found.missing is not None and found.missing.num_bytes == 746 * 10**8
    found = SGLANG.read_figures(f"{exceeds(9)} Try to allocate 48 tokens", "mem_fraction_static=0.5")
    assert found == EngineFigures(length=9, fitting_length=2000, batch=48, fraction=0.5)


CAUSES = {
    Cause.ENGINE_BUDGET: "vllm-budget",
    Cause.KV_CACHE: "vllm-no-cache vllm-cache sglang-cache sglang-state sglang-tokens sglang-length tgi-total",
    Cause.ENGINE_BATCH: "vllm-warm-up sglang-graphs tgi-prefill",
    Cause.HOST_MEMORY: "sglang-host ollama-host ggml-host tensorflow-host",
    Cause.DEVICE_MEMORY: "tensorrt-executor tensorrt-runtime ggml ggml-cuda ggml-buffer ggml-weights xla",
}
FIRST = "tgi-prefill tgi-total tensorrt-executor tensorrt-runtime ggml ggml-cuda"  # before others of their log


def test_an_engine_says_the_cause_in_its_message() -> None:
    made = {one.name: one for one in ENGINE_SIGNATURES}
    for cause, names in CAUSES.items():
        assert {made[name].cause for name in names.split()} == {cause}
    assert {name for name, one in made.items() if one.priority == 0} >= set(FIRST.split())
    assert {name for name, one in made.items() if one.priority == 2} == {"sglang-length"}


# -- TGI ---------------------------------------------------------------------------------------------------------------

TGI_WEIGHTS = ["> --quantize eetq", "> --num-shard 2"]
FP8 = "> --kv-cache-dtype fp8_e5m2"


@pytest.mark.parametrize(
    ("log", "known", "expected"),
    [
        ("KV-cache blocks: 1500, size: 16", {**KV, "message": "`max_total_tokens=32768`"}, [
            "> --max-total-tokens 24000", FP8, *TGI_WEIGHTS,
        ]),
        ("KV-cache blocks: 2048, size: 16 num_shard=3", {**KV, "message": "`max_total_tokens=32768`"}, [
            "> --max-total-tokens 16384", FP8, "> --quantize eetq", "6 3 > --num-shard 6",
        ]),
        ("", {"message": "`max_total_tokens=32768`"}, TGI_WEIGHTS),
        ("KV-cache blocks: 1, size: 0 quantize: Some(gptq)", {**KV, "message":
         "Not enough memory to handle 4097 total tokens with 17 prefill tokens"}, [
            "> --max-batch-total-tokens 2048", FP8, "> --num-shard 2",
        ]),
        ("", KV, TGI_WEIGHTS),
        ("num-shard 2", KV, ["> --quantize eetq", "4 2 > --num-shard 4"]),
        ("", {"stage": Stage.LOAD}, [*TGI_WEIGHTS, PROCESSES]),
        ("", {"message": "handle 1024 prefill tokens"}, [*TGI_WEIGHTS, PROCESSES]),
        ("", {"message": "handle 1025 prefill tokens"}, ["1,025 > --max-batch-prefill-tokens 512", *TGI_WEIGHTS]),
        # 1 - 2 / 80
        ("max_batch_prefill_tokens: Some(4097)", {"stage": Stage.SERVE, "tried": "3.00 GiB", "free": "1.00 GiB",
                                                 "total": "80.0 GiB"}, [
            "2.00 > --cuda-memory-fraction 0.97", "4,097 > --max-batch-prefill-tokens 2048", *TGI_WEIGHTS,
        ]),
        ("max_batch_prefill_tokens=1", {"stage": Stage.SERVE, "tried": "1.00 GiB", "free": "1.00 GiB",
                                        "total": "80.0 GiB"}, TGI_WEIGHTS),
        ("", {"stage": Stage.SERVE, "tried": "3.00 GiB", "free": "1.00 GiB"}, TGI_WEIGHTS),
        ("max-batch-prefill-tokens to 2", {"stage": Stage.WARM_UP, "tried": "3.00 GiB", "free": "1.00 GiB",
                                           "total": "80.0 GiB"}, ["2 > --max-batch-prefill-tokens 1", *TGI_WEIGHTS]),
    ],
)  # fmt: skip
def test_tgi(log: str, known: dict[str, Any], expected: list[str]) -> None:
    assert advise(TGI, log, **known) == expected


# -- TensorRT-LLM ------------------------------------------------------------------------------------------------------

SPREAD = "2 1 > --tp_size 2"
RUNTIME: dict[str, Any] = {"signature": "tensorrt-runtime"}
LEFT = "in paged kv cache: total: 5.5 GiB, available: {} GiB max_batch_size=9 kv_cache_free_gpu_memory_fraction 0.5"


def part(name: str, **sizes: str) -> dict[str, Any]:
    return {"message": f"could not be created: {name}", **sizes}


@pytest.mark.parametrize(
    ("log", "known", "expected"),
    [
        ("max_num_tokens=6000 max_batch_size=9 tp_size=4 kv_cache_free_gpu_mem_fraction=0.7", part("KV cache"), [
            "0.6 0.7 > --kv_cache_free_gpu_memory_fraction 0.6", "> --max_num_tokens 3000", "4 9 > --max_batch_size 4",
            "8 4 > --tp_size 8",
        ]),
        ("", part("KV cache"), [
            "0.8 0.9 > --kv_cache_free_gpu_memory_fraction 0.8", "> --max_num_tokens 4096", "> --max_batch_size 64",
            SPREAD,
        ]),
        ("maxBatchSize: 1", part("Sampler"), ["> --max_num_tokens 4096", "> --max_batch_size 64", SPREAD]),
        ("max_batch_size 2", part("Model resources"), ["> --max_num_tokens 4096", "1 2 > --max_batch_size 1", SPREAD]),
        # Less than 95% is free: others have some.
        ("max-num-tokens 1001", part("Model", free="75.9 GiB", total="80.0 GiB"), [
            SPREAD, PROCESSES, "> --max_num_tokens 500",
        ]),
        ("", part("Draft model", free="76.0 GiB", total="80.0 GiB"), [SPREAD, "> --max_num_tokens 4096"]),
        ("", part("Model", total="80.0 GiB"), [SPREAD, "> --max_num_tokens 4096"]),
        ("", part("Model", free="1.0 GiB"), [SPREAD, "> --max_num_tokens 4096"]),
        ("", {}, [SPREAD, "> --max_num_tokens 4096"]),
        (LEFT.format("0.99"), RUNTIME, [
            f"0.99 {PROCESSES}", "9 > --max_batch_size 4", "> --kv_cache_free_gpu_memory_fraction 0.4", SPREAD,
        ]),
        (LEFT.format("1.0"), RUNTIME, [
            "9 > --max_batch_size 4", "> --kv_cache_free_gpu_memory_fraction 0.4", SPREAD,
        ]),
        ("max_batch_size=2", RUNTIME, [
            "2 > --max_batch_size 1", "> --kv_cache_free_gpu_memory_fraction 0.8", SPREAD,
        ]),
        ("max_batch_size=1", RUNTIME, [
            "> --max_batch_size 8 --max_num_tokens 4096", "> --kv_cache_free_gpu_memory_fraction 0.8", SPREAD,
        ]),
    ],
)  # fmt: skip
def test_tensorrt_llm(log: str, known: dict[str, Any], expected: list[str]) -> None:
    assert advise(TENSORRT_LLM, log, **known) == expected


def test_sizes_of_tensorrt_llm() -> None:
    text = "Total GPU memory (GiB): 140.06\nFree GPU memory before component creation attempt (GiB): 139"
    assert read_executor_sizes(text) == MessageSizes(None, False, total=size("140.06 GiB"), free=size("139.00 GiB"))
    assert read_executor_sizes("") == MessageSizes(tried_is_segment=False)
    assert TENSORRT_LLM.read_figures("", "free_gpu_memory_fraction: .5").fraction == 0.5


# -- llama.cpp and Ollama ----------------------------------------------------------------------------------------------

Q8 = "--flash-attn on --cache-type-k q8_0 --cache-type-v q8_0"
BUFFERS = (
    "using device CUDA1 (NVIDIA A100) - 40000 MiB free\n CUDA1 model buffer size = 10000.00 MiB\n "
    "CUDA1 KV buffer size = 500.5 MiB\n CUDA0 model buffer size = 7.00 MiB"
)


def free(num_mib: int) -> str:
    return f"using device CUDA0 (A) - {num_mib} MiB free"


@pytest.mark.parametrize(
    ("log", "known", "expected"),
    [
        # 29,499.5 of 40,000 MiB are free: 48,332 tokens, and 188 times 256 of them.
        (f"{BUFFERS} n_ctx = 65536", {"message": "buffer for kv cache", "tried": "40000.00 MiB", "device": 1}, [
            "48,128 65,536 > --ctx-size 48128", f"20.75 40000.00 16 > {Q8}", "> --no-kv-offload", PROCESSES,
        ]),
        (f"{free(40000)} n_ctx = 1000", {"message": "KV cache", "tried": "40000.00 MiB"}, [
            "256 1,000 > --ctx-size 256", f"20.75 40000.00 16 > {Q8}", "> --no-kv-offload", PROCESSES,
        ]),
        # 34 of 64 bytes.
        (free(34000), {"message": "KV cache", "tried": "64000.00 MiB"}, [
            "> --ctx-size 4096", "> --no-kv-offload", PROCESSES,
        ]),
        (free(34001), {"message": "KV cache", "tried": "64000.00 MiB"}, [
            "> --ctx-size 4096", f"33.20 64000.00 16 > {Q8}", "> --no-kv-offload", PROCESSES,
        ]),
        ("-c 511", {"message": "KV cache"}, ["> --no-kv-offload", PROCESSES]),
        ("-c 512", {"message": "KV cache"}, ["256 512 > --ctx-size 256", "> --no-kv-offload", PROCESSES]),
        ("n_ubatch = 100 n_ctx = 1025 flash_attn = 0 offloaded 7/33 layers to GPU n_expert = 8",
         {"message": "graph_reserve", "tried": "400.00 MiB"}, [
            "100 100.00 400.00 > --ubatch-size 32", "> --flash-attn on", "512 1,025 > --ctx-size 512",
            "5 7 > --n-gpu-layers 5", "> --cpu-moe", PROCESSES,
        ]),
        ("flash_attn = disabled n_expert = 0", {"message": "compute pp buffers"}, [
            "512 > --ubatch-size 128", "> --flash-attn on", "> --ctx-size 4096", "20 > --n-gpu-layers 20", PROCESSES,
        ]),
        # 80 x 20,000 / 60,000
        (f"retrying without pipeline parallelism {free(20000)} offloaded 80/81 layers to GPU",
         {"message": "error loading model", "tried": "60000.00 MiB"}, [
            ">", "26 80 > --n-gpu-layers 26", "> --ctx-size 4096", PROCESSES,
        ]),
        ("offloaded 80/81 layers to GPU", {"message": "error loading model", "tried": "60000.00 MiB"}, [
            "60 80 > --n-gpu-layers 60", "> --ctx-size 4096", PROCESSES,
        ]),
        (f"{free(20000)} offloaded 80/81 layers to GPU", {"message": "error loading model"}, [
            "60 80 > --n-gpu-layers 60", "> --ctx-size 4096", PROCESSES,
        ]),
        (f"{free(20000)} offloaded 80/81 layers to GPU", {"tried": "60000.00 MiB"}, [
            "60 80 > --n-gpu-layers 60", "> --ctx-size 4096", PROCESSES,
        ]),
        ("offloaded 1/81 layers to GPU", {}, ["20 > --n-gpu-layers 20", "> --ctx-size 4096", PROCESSES]),
        ("offloaded 2/81 layers to GPU", {}, ["1 2 > --n-gpu-layers 1", "> --ctx-size 4096", PROCESSES]),
    ],
)  # fmt: skip
def test_llama_cpp(log: str, known: dict[str, Any], expected: list[str]) -> None:
    assert advise(LLAMA_CPP, log, **known) == expected


REQUIRES: dict[str, Any] = {
    "cause": Cause.HOST_MEMORY, "message": "model requires more system memory (9.0 GiB) than is available (4.5 GiB)",
}  # fmt: skip
STOP, SHORT = "> ollama stop MODEL", "> OLLAMA_CONTEXT_LENGTH=4096 ollama serve"
CACHE = "> OLLAMA_FLASH_ATTENTION=1 OLLAMA_KV_CACHE_TYPE=q8_0 ollama serve"


@pytest.mark.parametrize(
    ("log", "known", "expected"),
    [
        ("", {**REQUIRES, "tried": "9.0 GiB", "free": "4.5 GiB"}, [STOP, SHORT, "4.50 >"]),
        ("", {**REQUIRES, "tried": "9.1 GiB", "free": "4.5 GiB"}, ["4.50 >", STOP, SHORT, "4.50 >"]),
        ("", {"cause": Cause.HOST_MEMORY}, [STOP, SHORT, ">"]),
        ("", {"cause": Cause.HOST_MEMORY, "free": "4.5 GiB"}, [STOP, SHORT, ">"]),
        ("", {"cause": Cause.HOST_MEMORY, "tried": "9.0 GiB", "message": "requires more system memory (9.0 GiB)"},
         [STOP, SHORT, ">"]),
        ("n_ctx = 5001 offloaded 33/33 layers to GPU", {"message": "KV cache", "tried": "1025.00 MiB"}, [
            "2,500 5,001 > OLLAMA_CONTEXT_LENGTH=2500 ollama serve", CACHE,
            "2.00 > OLLAMA_GPU_OVERHEAD=2147483648 ollama serve", "24 33 > /set parameter num_gpu 24", STOP,
        ]),
        ("", {"message": "graph_reserve", "tried": "7.00 GiB"}, [
            SHORT, "7.00 > OLLAMA_GPU_OVERHEAD=7516192768 ollama serve", "20 > /set parameter num_gpu 20", STOP,
        ]),
        ("", {"tried": "8.00 GiB"}, ["20 > /set parameter num_gpu 20", STOP, SHORT]),
        ("n_ctx = 4096", {"tried": "8191.00 MiB"}, [
            "8.00 > OLLAMA_GPU_OVERHEAD=8589934592 ollama serve", "20 > /set parameter num_gpu 20", STOP,
            "2,048 4,096 > OLLAMA_CONTEXT_LENGTH=2048 ollama serve",
        ]),
    ],
)  # fmt: skip
def test_ollama(log: str, known: dict[str, Any], expected: list[str]) -> None:
    assert advise(OLLAMA, log, **known) == expected


@pytest.mark.parametrize(
    ("message", "log", "figures"),
    [
        ("buffer for kv cache, graph_reserve", "", EngineFigures("KV cache")),
        ("graph_reserve, buffer for kv cache", "", EngineFigures("compute buffer")),
        *(
            (phrase, "", EngineFigures("KV cache"))
            for phrase in ("llama_kv_cache_init", "unable to allocate kv", "KV cache")
        ),
        *(
            (phrase, "", EngineFigures("compute buffer"))
            for phrase in ("compute buffers", "gallocr_reserve", "compute pp buffers", "compute tg buffers")
        ),
        *(
            (phrase, "", EngineFigures("weights"))
            for phrase in ("error loading model", "unable to allocate", "failed to load model")
        ),
        ("is available (4.5 GiB)", "", EngineFigures()),
        ("requires more system memory (9.0 GiB)", "", EngineFigures()),
        # The first of several ways in which the log says it.
        ("", "MiB ( 12 cells --ctx-size 9 n_ctx = 7 n_ubatch = 4 -ub 5", EngineFigures(length=7, batch=4)),
        ("", "MiB ( 12 cells --ctx-size 9 -ub 5 worst-case: n_tokens = 3", EngineFigures(length=9, batch=5)),
        ("", "MiB ( 12 cells worst-case: n_tokens = 3", EngineFigures(length=12, batch=3)),
    ],
)  # fmt: skip
def test_figures_of_llama_cpp(message: str, log: str, figures: EngineFigures) -> None:
    assert LLAMA_CPP.read_figures(message, log) == figures


@pytest.mark.parametrize(
    ("message", "num_bytes", "device"),
    [
        ("ggml_cuda: allocating 512.00 MiB on device 3: failed", 512 << 20, 3),
        ("failed to allocate CUDA2 buffer of size 1048576", 1 << 20, 2),
        ("failed to allocate CPU buffer of size 5", 5, None),
        ("no", None, None),
    ],
)
def test_sizes_of_ggml(message: str, num_bytes: int | None, device: int | None) -> None:
    found = read_cuda_sizes(message)
    assert (None if found.tried is None else found.tried.num_bytes, found.device) == (num_bytes, device)
    assert not found.tried_is_segment


# -- XLA ---------------------------------------------------------------------------------------------------------------

REMAT, DONATE = "> layer = jax.checkpoint(layer)", "> step = jax.jit(step, donate_argnums=0)"
FRACTION = "> export XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
SHAPE = "OOM when allocating tensor with shape[64,1024]"
CHECKPOINT = "> from torch_xla.utils.checkpoint import checkpoint\n       hidden = checkpoint(layer, hidden)"


@pytest.mark.parametrize(
    ("engine", "log", "known", "expected"),
    [
        (JAX, "", {"message": "Used 40.00G of 30.00G hbm", "tried": "40.00 GiB", "total": "30.00 GiB"},
         ["75 >", REMAT, DONATE]),
        *((JAX, word, {"tried": "40.00 GiB"}, [">", REMAT, DONATE]) for word in ("libtpu", "TPU", "hbm", "HBM")),
        (JAX, "", {"message": "Error loading program"}, [">", REMAT, DONATE]),
        # 19 GiB are 95% of 20.
        (JAX, "total allocation:  19.00GiB", {"tried": "5.00 GiB"}, [f"19.00 20.00 {FRACTION}", PROCESSES, ">", REMAT]),
        (JAX, SHAPE, {"total": "5.00 GiB"}, [FRACTION, PROCESSES, "64 >", REMAT]),
        (TORCH_XLA, "", {}, [">", "> torch_xla.sync()", CHECKPOINT, PROCESSES]),
        (TORCH_XLA, "TPU", {}, [">", "> torch_xla.sync()", CHECKPOINT]),
        (TENSORFLOW, SHAPE, {}, [
            "64 >", PROCESSES, "> export TF_FORCE_GPU_ALLOW_GROWTH=true",
            "> export TF_GPU_ALLOCATOR=cuda_malloc_async",
        ]),
        (TENSORFLOW, "", {"cause": Cause.HOST_MEMORY}, [">"]),
    ],
)  # fmt: skip
def test_xla(engine: Engine, log: str, known: dict[str, Any], expected: list[str]) -> None:
    assert advise(engine, log, **known) == expected


@pytest.mark.parametrize(
    ("message", "tried", "others", "engine_part", "missing"),
    [
        ("Used 40.00G of 30.00G hbm", "40.00 GiB", ("30.00 GiB", None), "TPU program", "10.00 GiB"),
        ("Hbm usage: 34.82G, SparseCore Hbm usage 174.10G, exceeding available bytes: 95.74G", "208.92 GiB",
         ("95.74 GiB", None), "TPU program", "113.18 GiB"),
        ("Attempting to reserve 1.50G. There are 1.25G free", "1.50 GiB", (None, "1.25 GiB"), "", "256.00 MiB"),
        ("trying to allocate 5 bytes", "5 bytes", (None, None), "", None),
        ("Out of memory allocating 7 bytes", "7 bytes", (None, None), "", None),
        ("request for 8 bytes", "8 bytes", (None, None), "", None),
        (f"{SHAPE} and type half", "128.00 KiB", (None, None), "", None),
        (f"{SHAPE} and type complex", None, (None, None), "", None),
        ("Error loading program 'x'", None, (None, None), "TPU program", None),
    ],
)  # fmt: skip
def test_figures_of_xla(message: str, tried: str | None, others: tuple, engine_part: str, missing: str | None) -> None:
    sizes, figures = read_xla(message), JAX.read_figures(message, "")
    texts = [one and one.text for one in (sizes.tried, sizes.total, sizes.free)]
    assert texts == [tried, *others] and not sizes.tried_is_segment
    assert (figures.part, figures.missing and figures.missing.text) == (engine_part, missing)


@pytest.mark.parametrize(
    ("name", "item"),
    [("float", 4), ("double", 8), ("half", 2), ("bfloat16", 2), ("int32", 4), ("int64", 8), ("int8", 1), ("uint8", 1),
     ("bool", 1)],
)  # fmt: skip
def test_types_of_tensorflow(name: str, item: int) -> None:
    found = read_xla(f"OOM when allocating tensor with shape[3,5] and type {name}").tried
    assert found is not None and found.num_bytes == 15 * item


# -- what all have -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "model"),
    [
        ("vllm serve org/a", "org/a"),
        ("trtllm-serve serve ./models/b", "./models/b"),
        ("--model-path org/c --model=org/d", "org/d"),
        ("--model-id Some('org/e')", "org/e"),
        ("model_path='org/f'", "org/f"),
        ("model: ~/g/h", "~/g/h"),
        ("-m my.gguf", "my.gguf"),
        ("loading model, /m/i.gguf", "/m/i.gguf"),
        ("vllm serve plain", "MODEL"),
    ],
)
def test_the_model_that_a_log_names_last(log: str, model: str) -> None:
    assert EngineError(VLLM, Cause.KV_CACHE, "", MessageSizes(), EngineFigures(), log).model == model


@pytest.mark.parametrize(
    ("log", "is_quantized"),
    [
        ("quantization=awq", True), ("quantize: Some('eetq')", True), ("quantisation = fp8", True),
        ("org/x-GPTQ", True), ("marlin", True), ("nvfp4", True), ("mxfp4", True), ("org/y-FP8", True), ("int4", True),
        ("quantization=None", False), ("quantize: null", False), ("quantization=no", False), ("fp8", False),
        ("", False),
    ],
)  # fmt: skip
def test_weights_that_are_quantized_already(log: str, is_quantized: bool) -> None:
    assert EngineError(VLLM, Cause.KV_CACHE, "", MessageSizes(), EngineFigures(), log).is_quantized == is_quantized


@pytest.mark.parametrize(
    ("tried", "available", "shortfall"),
    [("3 GiB", "1 GiB", 2 << 30), ("1 GiB", "3 GiB", 0), (None, "1 GiB", None), ("1 GiB", None, None)],
)
def test_what_an_allocation_lacks(tried: str | None, available: str | None, shortfall: int | None) -> None:
    sizes = MessageSizes(tried=size(tried), free=size(available))
    assert EngineError(VLLM, Cause.KV_CACHE, "", sizes, EngineFigures(), "").shortfall == shortfall


def test_the_last_number_counts() -> None:
    assert (find_number(r"x=([\d.]+)", "x=1.5 x=2.75"), find_integer(r"x=(\d+)", "x=3 x=4")) == (2.75, 4)
    assert find_number(r"x=(\d)", "") is find_integer(r"x=(\d)", "") is None


@pytest.mark.parametrize(
    ("names", "stage"),
    [
        ({"load"}, Stage.LOAD), ({"load", "warm"}, Stage.WARM_UP), ({"serve", "warm"}, Stage.WARM_UP),
        ({"serve"}, Stage.SERVE), ({"other"}, Stage.UNKNOWN), ({"profile", "cache"}, Stage.CACHE),
    ],
)  # fmt: skip
def test_the_last_stage_of_a_start_decides(names: set[str], stage: Stage) -> None:
    functions = {
        Stage.LOAD: ("load",), Stage.SERVE: ("serve",), Stage.WARM_UP: ("warm",), Stage.CACHE: ("cache",),
        Stage.PROFILE: ("profile",),
    }  # fmt: skip
    engine = Engine("x", lambda error: iter(()), functions=functions)
    assert engine.find_stage(frozenset(names)) is stage


STAGES = [
    (VLLM, Stage.LOAD, "load_model load_weights create_weights"),
    (VLLM, Stage.PROFILE, "profile_run determine_available_memory determine_num_available_blocks "
     "profile_multimodal_encoder"),
    (VLLM, Stage.CACHE, "initialize_kv_cache initialize_from_config initialize_kv_cache_tensors _allocate_kv_cache"),
    (VLLM, Stage.WARM_UP, "compile_or_warm_up_model capture_model _dummy_sampler_run _dummy_pooler_run kernel_warmup "
     "capture_begin capture_end"),
    (VLLM, Stage.SERVE, "execute_model run_busy_loop step_with_batch_queue"),
    (SGLANG, Stage.LOAD, "load_model load_weights"),
    (SGLANG, Stage.CACHE, "init_memory_pool _create_buffers init_kv_cache"),
    (SGLANG, Stage.WARM_UP, "init_cuda_graphs init_device_graphs init_decode_cuda_graph capture capture_one_batch_size "
     "kernel_warmup"),
    (SGLANG, Stage.SERVE, "event_loop_normal event_loop_overlap run_batch forward_batch_generation "
     "forward_thread_func_"),
    (TGI, Stage.LOAD, "get_model get_model_with_lora_adapters serve_inner"),
    (TGI, Stage.WARM_UP, "warmup Warmup"),
    (TGI, Stage.SERVE, "Prefill Decode prefill decode"),
    (TENSORRT_LLM, Stage.LOAD, "load load_weights"),
    (TENSORRT_LLM, Stage.SERVE, "_executor_loop _forward_step"),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "stage", "names"), STAGES, ids=lambda value: getattr(value, "name", str(value)))
def test_functions_of_a_stage(engine: Engine, stage: Stage, names: str) -> None:
    assert [engine.find_stage(frozenset({name})) for name in names.split()] == [stage] * len(names.split())


# -- which engine ------------------------------------------------------------------------------------------------------


def frames(*paths: str) -> list[TracebackFrame]:
    return [TracebackFrame(path, 1, "f") for path in paths]


LIBRARY = "/venv/lib/python3.12/site-packages"


ENGINE_OF_ERRORS = [
    *((engine.name, [], "", "", engine.name) for engine in ENGINES),
    ("ggml", [], "", "", "llama.cpp"),
    ("ggml", [], "", "time=1 OLLAMA_HOST", "Ollama"),
    ("ggml", frames("/app/train.py"), "", "", "llama.cpp"),
    ("XLA", [], "", "", "JAX"),
    ("XLA", [], "", "import torch_xla", "torch_xla"),
    ("XLA", [], "", "import tensorflow", "TensorFlow"),
    # A path says more than the log.
    ("XLA", frames(f"{LIBRARY}/keras/x.py"), "", "import torch_xla", "TensorFlow"),
    ("XLA", frames(f"{LIBRARY}/jax/x.py"), "", "import torch_xla", "JAX"),
    ("torch", frames(f"{LIBRARY}/vllm/v1/x.py", f"{LIBRARY}/torch/x.py"), "", "", "vLLM"),
    ("CUDA", frames(f"{LIBRARY}/sglang/srt/x.py"), "", "", "SGLang"),
    ("cuBLAS", frames(f"{LIBRARY}/text_generation_server/x.py"), "", "", "TGI"),
    ("cuDNN", frames(f"{LIBRARY}/tensorrt_llm/x.py"), "", "", "TensorRT-LLM"),
    # Its caller is a program's own.
    ("torch", frames(f"{LIBRARY}/vllm/v1/x.py", "/app/train.py"), "", "", None),
    # With a traceback its line decides, and else the log.
    ("torch", frames(f"{LIBRARY}/torch/x.py"), "(EngineCore pid=9) error", "", "vLLM"),
    ("torch", frames(f"{LIBRARY}/torch/x.py"), "error", "see vllm serve ", None),
    ("torch", [], "error", "see vllm serve ", "vLLM"),
    ("torch", [], "(EngineCore pid=9) error", "", None),
    ("NCCL", [], "", "see vllm serve ", None),
]


def test_which_engine_an_error_is_of() -> None:
    for source, found_frames, first_line, log, name in ENGINE_OF_ERRORS:
        engine = find_engine(source, found_frames, first_line, log)
        assert (None if engine is None else engine.name) == name
