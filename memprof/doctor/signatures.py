"""The errors that are recognised, by their own words.

A signature's words are searched for in the raw log, so that gigabytes of it are read at the speed of the disk; its
pattern then decides, on the cleaned text around them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from memprof.doctor import figures as read
from memprof.doctor.diagnosis import Cause, Figures


def _nothing(text: str) -> Figures:
    return Figures(tried_is_segment=False)


@dataclass(frozen=True, slots=True)
class Signature:
    """One kind of error.

    Args:
        name: for tests and messages.
        words: any of these is in every such error.
        pattern: matches it, in text without prefixes and line breaks; compiled when it is first needed.
        source: what prints it.
        cause: what it means; None: the figures decide.
        figures: reads its amounts.
        rank: of several in a log the one with the lowest explains the others.
        one_line: the pattern is for the words' line alone.
    """

    name: str
    words: tuple[str, ...]
    pattern: str
    source: str
    cause: Cause | None
    figures: Callable[[str], Figures] = field(default=_nothing)
    rank: int = 1
    one_line: bool = False


def _signature(
    name: str, words: str | tuple[str, ...], pattern: str, source: str, cause: Cause | None, **more: object
) -> Signature:
    words = (words,) if isinstance(words, str) else words
    return Signature(name, words, pattern, source, cause, **more)  # type: ignore[arg-type]


_AT_LEAST_TWO = r"[Ee]xpected all tensors to be on the same device"

SIGNATURES: tuple[Signature, ...] = (
    _signature(
        "torch-oom",
        ("out of memory. Tried to allocate", "Tried to allocate"),
        r"(?:(?:CUDA|HIP|XPU) out of memory\. )?Tried to allocate [\d.]+ (?:bytes|[KMGT]iB)"
        r"(?:[ .]+\(?(?:GPU|XPU) |.{0,3}$)"
        r"|out of memory\. Tried to allocate [\d.]+ \w+",
        "torch",
        None,
        figures=read.caching_allocator,
        rank=0,
    ),
    _signature(
        "torch-exabyte",
        "Tried to allocate more than 1EB",
        r"Tried to allocate more than 1EB memory",
        "torch",
        Cause.LARGE_TENSOR,
        rank=0,
    ),
    _signature(
        "torch-preempted",
        "Allocation was preemptively rejected",
        r"would exceed per_process_memory_fraction limit",
        "torch",
        Cause.MEMORY_LIMIT,
        rank=0,
    ),
    _signature(
        "malloc-async",
        "would exceed allowed memory",
        r"Allocation on device \d* ?would exceed allowed memory",
        "torch (cudaMallocAsync)",
        None,
        figures=read.malloc_async,
        rank=0,
    ),
    _signature(
        "mps-oom",
        "MPS backend out of memory",
        r"MPS backend out of memory",
        "torch (MPS)",
        None,
        figures=read.mps,
        rank=0,
    ),
    _signature(
        "mismatch",
        ("tensors to be on the same device",),
        _AT_LEAST_TWO,
        "torch",
        Cause.DEVICE_MISMATCH,
        rank=0,
    ),
    _signature(
        "mismatch-type",
        ("should be the same",),
        r"(?:Input|input) type \((?:torch\.)?\w+(?:\.\w+)*\) and (?:weight|bias) type \((?:torch\.)?\w+(?:\.\w+)*\) "
        r"should be the same",
        "torch",
        Cause.DEVICE_MISMATCH,
        rank=0,
    ),
    _signature(
        "mismatch-object",
        ("Expected object of ", "xpected device "),
        r"[Ee]xpected device \S+ but got device \S+"
        r"|Expected object of (?:device type|backend|type) \S+ but got (?:device type|backend|type) \S+",
        "torch",
        Cause.DEVICE_MISMATCH,
        rank=0,
    ),
    _signature(
        "mismatch-argument",
        ("but expected it to be on", "but expected them to be on", "to have the same device"),
        r"is on (?:the )?\w+(?::\d+)?, ?but expected (?:it|them) to be on|expected \w+ and \w+ to have the same device"
        r"|but expected (?:it|them) to be on (?:GPU|cuda|CPU|cpu)",
        "torch",
        Cause.DEVICE_MISMATCH,
        rank=0,
    ),
    _signature(
        "mismatch-index",
        ("indices should be either on",),
        r"indices should be either on .{0,40}same device",
        "torch",
        Cause.DEVICE_MISMATCH,
        rank=0,
    ),
    _signature(
        "mismatch-module",
        ("parameters and buffers on device",),
        r"must have its parameters and buffers on device \S+",
        "torch",
        Cause.DEVICE_MISMATCH,
        rank=0,
    ),
    _signature(
        "mismatch-numpy",
        ("device type tensor to numpy",),
        r"can't convert \S+ device type tensor to numpy",
        "torch",
        Cause.DEVICE_MISMATCH,
        rank=0,
    ),
    _signature(
        "mismatch-generator",
        ("device type for generator",),
        r"Expected an? '?\w+'? device type for generator but found '?\w+'?",
        "torch",
        Cause.DEVICE_MISMATCH,
        rank=0,
    ),
    _signature(
        "mismatch-meta",
        ("is not on the expected device", "out of meta tensor"),
        r"Tensor on device \S+ is not on the expected device|Cannot copy out of meta tensor",
        "torch",
        Cause.DEVICE_MISMATCH,
        rank=0,
    ),
    _signature(
        "mismatch-mps",
        ("Placeholder storage has not been allocated on MPS",),
        r"Placeholder storage has not been allocated on MPS device",
        "torch (MPS)",
        Cause.DEVICE_MISMATCH,
        rank=0,
    ),
    _signature(
        "cublas",
        ("CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED", "HIPBLAS_STATUS_ALLOC_FAILED"),
        r"(?:HIP|CU)BLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)",
        "cuBLAS",
        Cause.LIBRARY_HANDLE,
    ),
    _signature(
        "cudnn",
        ("CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOC"),
        r"CUDNN_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED|INTERNAL_ERROR_DEVICE_ALLOC\w*)",
        "cuDNN",
        Cause.LIBRARY_HANDLE,
    ),
    _signature(
        "ggml",
        ("cudaMalloc failed: out of memory",),
        r"(?:allocating [\d.]+ MiB on device \d+: )?cudaMalloc failed: out of memory",
        "ggml",
        Cause.DEVICE_MEMORY,
        figures=read.cuda_malloc,
        rank=0,
    ),
    _signature(
        "pinned",
        ("pin memory thread", "cudaHostAlloc", "CachingHostAllocator", "pin_memory"),
        r"(?=.*(?:[Cc]aught RuntimeError in pin memory thread|cudaHostAlloc|CachingHostAllocator|in pin_memory))"
        r"(?=.*CUDA error: (?:out of memory|OS call failed))",
        "torch",
        Cause.HOST_MEMORY,
    ),
    _signature(
        "cuda-error",
        (
            "CUDA error: out of memory",
            "HIP error: out of memory",
            "CUDA_ERROR_OUT_OF_MEMORY",
            "cudaErrorMemoryAllocation",
            "CUDA error 2",
            "cuda runtime error (2)",
        ),
        r"(?:CUDA|HIP) error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
        r"|cuda runtime error \(2\) ?: out of memory",
        "CUDA",
        Cause.DEVICE_MEMORY,
        rank=2,
    ),
    _signature(
        "xla",
        ("RESOURCE_EXHAUSTED", "Resource exhausted", "ResourceExhaustedError"),
        r"RESOURCE_EXHAUSTED|Resource exhausted: |ResourceExhaustedError",
        "XLA",
        Cause.DEVICE_MEMORY,
        figures=read.xla,
    ),
    _signature(
        "vllm-budget",
        ("is less than desired GPU memory utilization",),
        r"Free memory on device.{0,60}on startup is less than desired GPU memory utilization",
        "vLLM",
        Cause.ENGINE_BUDGET,
        figures=read.engine_budget,
    ),
    _signature(
        "vllm-no-cache",
        ("No available memory for the cache blocks",),
        r"No available memory for the cache blocks",
        "vLLM",
        Cause.KV_CACHE,
    ),
    _signature(
        "vllm-cache",
        (
            "that can be stored in KV cache",
            "To serve at least one request",
            "Not enough memory. Please try to increase",
        ),
        r"larger than the maximum number of tokens that can be stored in KV cache"
        r"|To serve at least one request with the model\w*.?s max seq len"
        r"|Not enough memory\. Please try to increase --mem-f",
        "vLLM",
        Cause.KV_CACHE,
        figures=read.kv_cache,
    ),
    _signature(
        "batch-finder",
        ("No executable batch size found",),
        r"No executable batch size found, reached zero",
        "accelerate",
        Cause.CARD_FULL,
    ),
    _signature(
        "spilled",
        ("dispatched on the CPU or the disk", "offload the whole model to the disk", "offloaded to the disk. Please"),
        r"modules are dispatched on the CPU or the disk|trying to offload the whole model to the disk"
        r"|had weights offloaded to the disk",
        "transformers",
        Cause.MODEL_SPILLS,
    ),
    _signature(
        "host-request",
        ("DefaultCPUAllocator", "Cannot allocate memory", "Unable to allocate"),
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)"
        r"|OSError: \[Errno 12\] Cannot allocate memory|MemoryError: Unable to allocate [\d.]+ [KMGT]iB",
        "torch (CPU)",
        Cause.HOST_MEMORY,
        figures=read.host_request,
    ),
    _signature(
        "shm",
        ("insufficient shared memory", "out of shared memory", "torch_shm", "write to shm", "unable to open shared"),
        r"insufficient shared memory \(shm\)|workers are out of shared memory"
        r"|unable to (?:write to|open|mmap|resize) (?:file|shared memory).{0,80}(?:torch_|shm|No space)"
        r"|No space left on device.{0,40}shm",
        "torch (DataLoader)",
        Cause.SHARED_MEMORY,
        rank=0,
    ),
    _signature(
        "bus-error",
        ("killed by signal: Bus error",),
        r"DataLoader worker \(pid[^)]*\)+ is killed by signal: Bus error",
        "torch (DataLoader)",
        Cause.SHARED_MEMORY,
    ),
    _signature(
        "kernel",
        ("Out of memory: Kill", "oom-kill:", "oom_reaper", "Memory cgroup out of memory", "invoked oom-killer"),
        r"Out of memory: Kill(?:ed)? process \d+|oom-kill:constraint|Memory cgroup out of memory|invoked oom-killer",
        "the kernel",
        Cause.HOST_KILLED,
    ),
    _signature(
        "orchestrator",
        (
            "OOMKilled",
            "oom_kill event",
            "oom-kill event",
            "OOM Killed",
            "out-of-memory handler",
            "due to the node running low on memory",
            "due to memory pressure (OOM)",
            "the memory usage threshold",
            "SYSTEM_OOM",
        ),
        r"OOMKilled|[Oo]ut.?[Oo]f.?[Mm]emory handler|oom[-_]kill event|OOM Killed|node running low on memory"
        r"|killed due to memory pressure|exceeds the memory usage threshold",
        "the scheduler",
        Cause.HOST_KILLED,
    ),
    _signature(
        "worker-killed",
        ("is killed by signal: Killed",),
        r"DataLoader worker \(pid[^)]*\)+ is killed by signal: Killed",
        "torch (DataLoader)",
        Cause.HOST_KILLED,
        rank=2,
    ),
    _signature(
        "exit-code",
        (
            "return code = -9",
            "exitcode: -9",
            "exitcode  : -9",
            "exitcode -9",
            "Signal 9 (SIGKILL)",
            "signal 9 (SIGKILL)",
            "exit code 137",
            "signal 9: SIGKILL",
            "signal 9:SIGKILL",
            "died with <Signals.SIGKILL",
            "exit status 137",
            "exit code: 137",
            "SIGKILL",
            "status code 137",
            "exited with code 137",
            "Exit Code: 137",
            "exit code -9",
            "returned non-zero exit status 137",
            "Exited with exit code 137",
        ),
        r"return code = -9\b|exit ?code ?[:=]? ?-9\b|[Ss]ignal 9:? ?\(?SIGKILL|Signals\.SIGKILL"
        r"|(?:exit|exited|status|Exit).{0,14}\b137\b|terminated by signal SIGKILL|exitcode=-9",
        "the system",
        Cause.HOST_KILLED,
        rank=3,
    ),
    _signature(
        "killed",
        ("Killed",),
        r"(?:^|[\s\])|*])Killed(?:\*\*|[.!])?(?:\s{2,}\S.{0,120})?$",
        "the shell",
        Cause.HOST_KILLED,
        rank=3,
        one_line=True,
    ),
    _signature(
        "torch-oom-bare",
        ("CUDA out of memory", "HIP out of memory", "XPU out of memory", "OutOfMemoryError"),
        r"(?:CUDA|HIP|XPU) out of memory|torch(?:\.cuda)?\.OutOfMemoryError",
        "torch",
        Cause.DEVICE_MEMORY,
        rank=2,
    ),
)
"""In the order in which they are tried: the more telling first."""
