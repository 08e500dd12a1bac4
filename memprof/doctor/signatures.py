"""The errors that the doctor recognizes, by their wording.

A signature's words are searched for in the raw log, at the speed of the disk; its pattern then must match the cleaned
text around the words.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memprof.doctor import figures as read
from memprof.doctor.diagnosis import Cause, Figures


@dataclass(frozen=True, slots=True)
class Signature:
    """One kind of error: words, pattern, source and cause."""

    name: str  # for tests and messages.
    words: tuple[str, ...]  # any of these is in every such error.
    pattern: str  # matches it, in text without prefixes and line breaks; compiled when it is first needed.
    source: str  # what prints it.
    cause: Cause | None = None  # what it means; None: the figures decide.
    figures: Callable[[str], Figures] = lambda text: Figures(tried_is_segment=False)  # reads its amounts.
    rank: int = 1  # of several in a log the one with the lowest explains the others.
    one_line: bool = False  # the pattern is for the words' line alone.


def _signature(name: str, words: str, pattern: str = "", **more: Any) -> Signature:
    """Return a signature of words that are separated by |; without a pattern, any of the words is enough."""
    each = tuple(words.split("|"))
    return Signature(name, each, pattern or "|".join(map(re.escape, each)), **more)


def _mismatch(name: str, words: str, pattern: str = "", source: str = "torch") -> Signature:
    return _signature(name, words, pattern, source=source, cause=Cause.DEVICE_MISMATCH, rank=0)


# In the order in which they are tried: the more specific first.
SIGNATURES: tuple[Signature, ...] = (
    _signature(
        "torch-oom", "Tried to allocate",
        r"(?:(?:CUDA|HIP|XPU) out of memory\. )?Tried to allocate [\d.]+ (?:bytes|[KMGT]iB)"
        r"(?:[ .]+\(?(?:GPU|XPU) |.{0,3}$)"
        r"|out of memory\. Tried to allocate [\d.]+ \w+",
        source="torch", figures=read.caching_allocator, rank=0,
    ),
    _signature("torch-exabyte", "Tried to allocate more than 1EB", source="torch", cause=Cause.LARGE_TENSOR, rank=0),
    _signature(
        "torch-preempted", "Allocation was preemptively rejected", r"would exceed per_process_memory_fraction limit",
        source="torch", cause=Cause.MEMORY_LIMIT, rank=0,
    ),
    _signature(
        "malloc-async", "would exceed allowed memory", r"Allocation on device \d* ?would exceed allowed memory",
        source="torch (cudaMallocAsync)", figures=read.malloc_async, rank=0,
    ),
    _signature("mps-oom", "MPS backend out of memory", source="torch (MPS)", figures=read.mps, rank=0),
    _signature(
        "mps-buffer", "Invalid buffer size", r"Invalid buffer size: [\d.]+ [KMGT]i?B", source="torch (MPS)",
        cause=Cause.LARGE_TENSOR, figures=read.metal_buffer,
    ),
    _mismatch(
        "mismatch",
        "tensors to be on the same device|tensors to be on same device|tensors on the same device"
        "|tensors on same device",
        r"[Ee]xpected all tensors (?:to be )?on (?:the )?same device",
    ),
    _signature(
        "fragmented", "memory is fragmented", source="the program", cause=Cause.FRAGMENTATION, rank=2, one_line=True,
    ),
    _mismatch(
        "mismatch-type", "should be the same",
        r"(?:Input|input) type \((?:torch\.)?\w+(?:\.\w+)*\) and (?:weight|bias) type \((?:torch\.)?\w+(?:\.\w+)*\) "
        r"should be the same",
    ),
    _mismatch(
        "mismatch-object", "Expected object of |xpected device ",
        r"[Ee]xpected device \S+ but got device \S+"
        r"|Expected object of (?:device type|backend|type) \S+ but got (?:device type|backend|type) \S+",
    ),
    _mismatch(
        "mismatch-argument", "but expected it to be on|but expected them to be on|to have the same device",
        r"is on (?:the )?\w+(?::\d+)?, ?but expected (?:it|them) to be on|expected \w+ and \w+ to have the same device"
        r"|but expected (?:it|them) to be on (?:GPU|cuda|CPU|cpu)",
    ),
    _mismatch("mismatch-index", "indices should be either on", r"indices should be either on .{0,40}same device"),
    _mismatch(
        "mismatch-module", "parameters and buffers on device", r"must have its parameters and buffers on device \S+",
    ),
    _mismatch("mismatch-numpy", "device type tensor to numpy", r"can't convert \S+ device type tensor to numpy"),
    _mismatch(
        "mismatch-generator", "device type for generator",
        r"Expected an? '?\w+'? device type for generator but found '?\w+'?",
    ),
    _mismatch(
        "mismatch-meta", "is not on the expected device|out of meta tensor",
        r"Tensor on device \S+ is not on the expected device|Cannot copy out of meta tensor",
    ),
    _mismatch("mismatch-mps", "Placeholder storage has not been allocated on MPS", source="torch (MPS)"),
    _signature(
        "cublas", "CUBLAS_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED|HIPBLAS_STATUS_ALLOC_FAILED",
        source="cuBLAS", cause=Cause.LIBRARY_HANDLE,
    ),
    _signature(
        "cudnn", "CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_NOT_INITIALIZED|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOC",
        source="cuDNN", cause=Cause.LIBRARY_HANDLE,
    ),
    _signature(
        "nccl", "unhandled cuda error|Failed to CUDA|NCCL WARN Cuda failure|ncclUnhandledCudaError",
        r"(?:unhandled cuda error|NCCL WARN|ncclUnhandledCudaError)(?:(?!Cuda failure).){0,700}?"
        r"(?:Cuda failure (?:2 )?'out of memory'|Failed to CUDA (?:host )?c?alloc)",
        source="NCCL", cause=Cause.LIBRARY_HANDLE, figures=read.nccl,
    ),
    _signature(
        "nccl-unknown", "unhandled cuda error|ncclUnhandledCudaError",
        r"(?:unhandled cuda error|ncclUnhandledCudaError)(?!.{0,700}Cuda failure)", source="NCCL",
        cause=Cause.NOT_KNOWN, rank=3,
    ),
    _signature(
        "cudnn-unknown", "CUDNN_STATUS_NOT_SUPPORTED|unable to find an engine",
        r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED|unable to find an engine to execute this computation", source="cuDNN",
        cause=Cause.NOT_KNOWN, rank=3,
    ),
    _signature(
        "bitsandbytes", "Error out of memory at line", r"Error out of memory at line \d+ in file",
        source="bitsandbytes", cause=Cause.DEVICE_MEMORY,
    ),
    _signature(
        "ggml", "cudaMalloc failed: out of memory",
        r"(?:allocating [\d.]+ MiB on device \d+: )?cudaMalloc failed: out of memory", source="ggml",
        cause=Cause.DEVICE_MEMORY, figures=read.cuda_malloc, rank=0,
    ),
    _signature(
        "pinned", "pin memory thread|cudaHostAlloc|CachingHostAllocator|pin_memory",
        r"(?=.*(?:[Cc]aught RuntimeError in pin memory thread|cudaHostAlloc|CachingHostAllocator|in pin_memory))"
        r"(?=.*CUDA error: (?:out of memory|OS call failed))",
        source="torch", cause=Cause.HOST_MEMORY,
    ),
    _signature(
        "cuda-error",
        "CUDA error: out of memory|HIP error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
        "|CUDA error 2|cuda runtime error (2)|UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
        r"(?:CUDA|HIP) error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
        r"|UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"
        r"|cuda runtime error \(2\) ?: out of memory",
        source="CUDA", cause=Cause.DEVICE_MEMORY, rank=2,
    ),
    _signature(
        "tensorflow-host", "OOM when allocating tensor",
        r"OOM when allocating tensor.{0,200}(?:CPU:\d|by allocator cpu)", source="TensorFlow", cause=Cause.HOST_MEMORY,
        figures=read.xla,
    ),
    _signature(
        "xla", "RESOURCE_EXHAUSTED|Resource exhausted|ResourceExhaustedError",
        r"RESOURCE_EXHAUSTED|Resource exhausted: |ResourceExhaustedError", source="XLA", cause=Cause.DEVICE_MEMORY,
        figures=read.xla,
    ),
    _signature(
        "vllm-budget", "is less than desired GPU memory utilization",
        r"Free memory on device.{0,60}on startup is less than desired GPU memory utilization", source="vLLM",
        cause=Cause.ENGINE_BUDGET, figures=read.engine_budget,
    ),
    _signature("vllm-no-cache", "No available memory for the cache blocks", source="vLLM", cause=Cause.KV_CACHE),
    _signature(
        "vllm-cache", "that can be stored in KV cache|To serve at least one request",
        r"larger than the maximum number of tokens that can be stored in KV cache"
        r"|To serve at least one request with the model\w*.?s max seq len",
        source="vLLM", cause=Cause.KV_CACHE, figures=read.kv_cache,
    ),
    _signature(
        "sglang-cache", "Not enough memory. Please try to increase",
        r"Not enough memory\. Please try to increase --mem-f", source="SGLang", cause=Cause.KV_CACHE,
    ),
    _signature("batch-finder", "No executable batch size found", source="accelerate", cause=Cause.GPU_FULL),
    _signature(
        "spilled",
        "dispatched on the CPU or the disk|offload the whole model to the disk|offloaded to the disk. Please",
        r"modules are dispatched on the CPU or the disk|trying to offload the whole model to the disk"
        r"|had weights offloaded to the disk",
        source="transformers", cause=Cause.MODEL_SPILLS,
    ),
    _signature(
        "host-request", "DefaultCPUAllocator|Cannot allocate memory|Unable to allocate",
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)"
        r"|OSError: \[Errno 12\] Cannot allocate memory|MemoryError: Unable to allocate [\d.]+ [KMGT]iB",
        source="torch (CPU)", cause=Cause.HOST_MEMORY, figures=read.host_request,
    ),
    _signature(
        "shm",
        "insufficient shared memory|out of shared memory|torch_shm|write to shm|unable to open shared"
        "|failed to extend /dev/shm|posix_fallocate failed|creating shared memory segment",
        r"failed to extend /dev/shm/nccl|posix_fallocate failed ?: ?No space left on device"
        r"|creating shared memory segment.{0,120}No space left on device"
        r"|insufficient shared memory \(shm\)|workers are out of shared memory"
        r"|unable to (?:write to|open|mmap|resize) (?:file|shared memory).{0,80}(?:torch_|shm|No space)"
        r"|No space left on device.{0,40}shm",
        source="torch (DataLoader)", cause=Cause.SHARED_MEMORY, rank=0,
    ),
    _signature(
        "bus-error", "killed by signal: Bus error", r"DataLoader worker \(pid[^)]*\)+ is killed by signal: Bus error",
        source="torch (DataLoader)", cause=Cause.SHARED_MEMORY,
    ),
    _signature(
        "kernel", "Out of memory: Kill|oom-kill:|oom_reaper|Memory cgroup out of memory|invoked oom-killer",
        r"Out of memory: Kill(?:ed)? process \d+|oom-kill:constraint|Memory cgroup out of memory|invoked oom-killer",
        source="the kernel", cause=Cause.HOST_KILLED,
    ),
    _signature(
        "orchestrator",
        "OOMKilled|oom_kill event|oom-kill event|OOM Killed|out-of-memory handler|due to the node running low on memory"
        "|due to memory pressure (OOM)|the memory usage threshold|SYSTEM_OOM",
        r"OOMKilled|[Oo]ut.?[Oo]f.?[Mm]emory handler|oom[-_]kill event|OOM Killed|node running low on memory"
        r"|killed due to memory pressure|exceeds the memory usage threshold",
        source="the scheduler", cause=Cause.HOST_KILLED,
    ),
    _signature(
        "worker-killed", "is killed by signal: Killed", r"DataLoader worker \(pid[^)]*\)+ is killed by signal: Killed",
        source="torch (DataLoader)", cause=Cause.HOST_KILLED, rank=2,
    ),
    _signature(
        "exit-code",
        "return code = -9|exitcode: -9|exitcode  : -9|exitcode -9|exit code 137|exit status 137|exit code: 137|SIGKILL"
        "|status code 137|exited with code 137|Exit Code: 137|exit code -9",
        r"return code = -9\b|exit ?code ?[:=]? ?-9\b|[Ss]ignal 9:? ?\(?SIGKILL|Signals\.SIGKILL"
        r"|(?:exit|exited|status|Exit).{0,14}\b137\b|terminated by signal SIGKILL|exitcode=-9",
        source="the system", cause=Cause.HOST_KILLED, rank=3,
    ),
    _signature(
        "killed", "Killed", r"(?:^|[\s\])|*])Killed(?:\*\*|[.!])?(?:\s{2,}\S.{0,120})?$", source="the shell",
        cause=Cause.HOST_KILLED, rank=3, one_line=True,
    ),
    _signature(
        "torch-oom-bare", "CUDA out of memory|HIP out of memory|XPU out of memory|OutOfMemoryError",
        r"(?:CUDA|HIP|XPU) out of memory|torch(?:\.cuda)?\.OutOfMemoryError", source="torch", cause=Cause.DEVICE_MEMORY,
        rank=2,
    ),
)  # fmt: skip
