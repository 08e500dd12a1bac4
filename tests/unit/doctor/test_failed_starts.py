"""Failed starts of inference engines, one of each kind: what resolved them is among the first advice."""

from __future__ import annotations

import io

import pytest

from memprof.doctor import diagnose_log

# Kind -> log (messages as the engines print them, with published figures) and the command that resolved it.
STARTS = {
    "KV cache too small, no length named": (
        "ValueError: To serve at least one request with the models's max seq len (1048576), (24.00 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (9.97 GiB).",
        "--max-model-len 435280",
    ),
    "KV cache too small, length named": (
        "ValueError: To serve at least one request with the models's max seq len (30000), (6.66 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (5.44 GiB). Based on the available memory, the "
        "estimated maximum model length is 13528.",
        "--max-model-len 13528",
    ),
    "LoRA slots took the room": (
        "INFO non-default args: {'enable_lora': True, 'max_loras': 8}\nValueError: To serve at least one request with "
        "the models's max seq len (4096), (0.22 GiB KV cache is needed, which is larger than the available KV cache "
        "memory (0.09 GiB). Based on the available memory, the estimated maximum model length is 1664.",
        "--max-loras 4",
    ),
    "more tokens than the cache has": (
        "ValueError: The model's max seq len (29000) is larger than the maximum number of tokens that can be stored in "
        "KV cache (23648). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.",
        "--max-model-len 23648",
    ),
    "no cache blocks": (
        "INFO args: {'gpu_memory_utilization': 0.1}\nINFO Available KV cache memory: -23.55 GiB\nValueError: No "
        "available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
        "--gpu-memory-utilization 0.92",
    ),
    "less free than requested": (
        "ValueError: Free memory on device cuda:0 (6.93/8.0 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 7.2 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        "--gpu-memory-utilization 0.86",
    ),
    "workers of an earlier engine": (
        "ValueError: Free memory on device cuda:0 (4.98/15.6 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 14.04 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        "kill PID",
    ),
    "the sampler's warm-up": (
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests. Please try "
        "lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
        "--max-num-seqs 128",
    ),
    "SGLang's weights exceed the fraction": (
        "server_args=ServerArgs(model_path='m', mem_fraction_static=0.88)\nLoad weight begin. avail mem=140.00 GB\n"
        "Load weight end. type=M, dtype=torch.bfloat16, avail mem=14.35 GB, mem usage=125.65 GB.\nRuntimeError: Not "
        "enough memory. Please try to increase --mem-fraction-static. Current value: mem_fraction_static=0.88",
        "--mem-fraction-static 0.9",
    ),
    "llama.cpp's cache": (
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 204800.00 MiB on device 0: cudaMalloc failed: out of "
        "memory\nllama_kv_cache_init: failed to allocate buffer for kv cache",
        "--ctx-size 4096",
    ),
    "llama.cpp's compute buffer": (
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 51748.72 MiB on device 1: cudaMalloc failed: out of "
        "memory\nggml_gallocr_reserve_n: failed to allocate CUDA1 buffer of size 54262471680",
        "--ubatch-size 128",
    ),
    "Ollama's host memory": (
        "Error: model requires more system memory (446.3 GiB) than is available (37.3 GiB)",
        "ollama stop MODEL",
    ),
    "TGI's warm-up": (
        "RuntimeError: Not enough memory to handle 4096 prefill tokens. You need to decrease "
        "`--max-batch-prefill-tokens`",
        "--max-batch-prefill-tokens 2048",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", STARTS)
def test_what_resolved_it_is_advised(kind: str) -> None:
    log, command = STARTS[kind]
    diagnoses, _ = diagnose_log(io.BytesIO(f"{log}\n".encode()), "server.log")
    assert any(command in step.command for step in diagnoses[0].steps[:3])
