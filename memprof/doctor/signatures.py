"""The errors that `memprof doctor` recognizes: substrings to search the log for, and a pattern for the text around.

The pattern must match the text without log prefixes and line breaks. Those of engines are in engines/.
"""

from __future__ import annotations

from memprof.doctor import message_sizes as sizes
from memprof.doctor.diagnosis import Cause
from memprof.doctor.engines import ENGINE_SIGNATURES
from memprof.doctor.signature import Signature, make_signature


def _make_mismatch(name: str, words: str, pattern: str = "", source: str = "torch") -> Signature:
    return make_signature(name, words, pattern, source=source, cause=Cause.DEVICE_MISMATCH, priority=0)


# In the order of matching, specific ones first.
SIGNATURES: tuple[Signature, ...] = (
    make_signature(
        "torch-oom", "Tried to allocate",
        r"(?:(?:CUDA|HIP|XPU) out of memory\. )?Tried to allocate [\d.]+ (?:bytes|[KMGT]iB)"
        r"(?:[ .]+\(?(?:GPU|XPU) |.{0,3}$)"
        r"|out of memory\. Tried to allocate [\d.]+ \w+",
        source="torch", get_sizes=sizes.read_caching_allocator, priority=0,
    ),
    make_signature(
        "torch-exabyte", "Tried to allocate more than 1EB", source="torch", cause=Cause.LARGE_TENSOR, priority=0,
    ),
    make_signature(
        "torch-preempted", "Allocation was preemptively rejected", r"would exceed per_process_memory_fraction limit",
        source="torch", cause=Cause.MEMORY_LIMIT, priority=0,
    ),
    make_signature(
        "malloc-async", "would exceed allowed memory", r"Allocation on device \d* ?would exceed allowed memory",
        source="torch (cudaMallocAsync)", get_sizes=sizes.read_malloc_async, priority=0,
    ),
    make_signature("mps-oom", "MPS backend out of memory", source="torch (MPS)", get_sizes=sizes.read_mps, priority=0),
    make_signature(
        "mps-buffer", "Invalid buffer size", r"Invalid buffer size: [\d.]+ [KMGT]i?B", source="torch (MPS)",
        cause=Cause.LARGE_TENSOR, get_sizes=sizes.read_metal_buffer,
    ),
    _make_mismatch(
        "mismatch",
        "tensors to be on the same device|tensors to be on same device|tensors on the same device"
        "|tensors on same device",
        r"[Ee]xpected all tensors (?:to be )?on (?:the )?same device",
    ),
    make_signature(
        "fragmented", "memory is fragmented", source="the program", cause=Cause.FRAGMENTATION, priority=2,
        is_one_line=True,
    ),
    _make_mismatch(
        "mismatch-type", "should be the same",
        r"(?:Input|input) type \((?:torch\.)?\w+(?:\.\w+)*\) and (?:weight|bias) type \((?:torch\.)?\w+(?:\.\w+)*\) "
        r"should be the same",
    ),
    _make_mismatch(
        "mismatch-object", "Expected object of |xpected device ",
        r"[Ee]xpected device \S+ but got device \S+"
        r"|Expected object of (?:device type|backend|type) \S+ but got (?:device type|backend|type) \S+",
    ),
    _make_mismatch(
        "mismatch-argument", "but expected it to be on|but expected them to be on|to have the same device",
        r"is on (?:the )?\w+(?::\d+)?, ?but expected (?:it|them) to be on|expected \w+ and \w+ to have the same device"
        r"|but expected (?:it|them) to be on (?:GPU|cuda|CPU|cpu)",
    ),
    _make_mismatch("mismatch-index", "indices should be either on", r"indices should be either on .{0,40}same device"),
    _make_mismatch(
        "mismatch-module", "parameters and buffers on device", r"must have its parameters and buffers on device \S+",
    ),
    _make_mismatch("mismatch-numpy", "device type tensor to numpy", r"can't convert \S+ device type tensor to numpy"),
    _make_mismatch(
        "mismatch-generator", "device type for generator",
        r"Expected an? '?\w+'? device type for generator but found '?\w+'?",
    ),
    _make_mismatch(
        "mismatch-meta", "is not on the expected device|out of meta tensor",
        r"Tensor on device \S+ is not on the expected device|Cannot copy out of meta tensor",
    ),
    _make_mismatch("mismatch-mps", "Placeholder storage has not been allocated on MPS", source="torch (MPS)"),
    make_signature(
        "cublas", "CUBLAS_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED|HIPBLAS_STATUS_ALLOC_FAILED",
        source="cuBLAS", cause=Cause.LIBRARY_HANDLE,
    ),
    make_signature(
        "cudnn", "CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_NOT_INITIALIZED|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOC",
        source="cuDNN", cause=Cause.LIBRARY_HANDLE,
    ),
    make_signature(
        "nccl", "unhandled cuda error|Failed to CUDA|NCCL WARN Cuda failure|ncclUnhandledCudaError",
        r"(?:unhandled cuda error|NCCL WARN|ncclUnhandledCudaError)(?:(?!Cuda failure).){0,700}?"
        r"(?:Cuda failure (?:2 )?'out of memory'|Failed to CUDA (?:host )?c?alloc)",
        source="NCCL", cause=Cause.LIBRARY_HANDLE, get_sizes=sizes.read_nccl,
    ),
    make_signature(
        "nccl-unknown", "unhandled cuda error|ncclUnhandledCudaError",
        r"(?:unhandled cuda error|ncclUnhandledCudaError)(?!.{0,700}Cuda failure)", source="NCCL",
        cause=Cause.NOT_KNOWN, priority=3,
    ),
    make_signature(
        "cudnn-unknown", "CUDNN_STATUS_NOT_SUPPORTED|unable to find an engine",
        r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED|unable to find an engine to execute this computation", source="cuDNN",
        cause=Cause.NOT_KNOWN, priority=3,
    ),
    make_signature(
        "bitsandbytes", "Error out of memory at line", r"Error out of memory at line \d+ in file",
        source="bitsandbytes", cause=Cause.DEVICE_MEMORY,
    ),
    *ENGINE_SIGNATURES,
    make_signature(
        "pinned", "pin memory thread|cudaHostAlloc|CachingHostAllocator|pin_memory",
        r"(?=.*(?:[Cc]aught RuntimeError in pin memory thread|cudaHostAlloc|CachingHostAllocator|in pin_memory))"
        r"(?=.*CUDA error: (?:out of memory|OS call failed))",
        source="torch", cause=Cause.HOST_MEMORY,
    ),
    make_signature(
        "cuda-error",
        "CUDA error: out of memory|CUDA driver error: out of memory|HIP error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
        "|cudaErrorMemoryAllocation|CUDA error 2|cuda runtime error (2)|UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
        r"(?:CUDA(?: driver)?|HIP) error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
        r"|UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"
        r"|cuda runtime error \(2\) ?: out of memory",
        source="CUDA", cause=Cause.DEVICE_MEMORY, priority=2,
    ),
    make_signature("batch-finder", "No executable batch size found", source="accelerate", cause=Cause.GPU_FULL),
    make_signature(
        "spilled",
        "dispatched on the CPU or the disk|offload the whole model to the disk|offloaded to the disk. Please",
        r"modules are dispatched on the CPU or the disk|trying to offload the whole model to the disk"
        r"|had weights offloaded to the disk",
        source="transformers", cause=Cause.MODEL_SPILLS,
    ),
    make_signature(
        "host-request", "DefaultCPUAllocator|Cannot allocate memory|Unable to allocate",
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)"
        r"|OSError: \[Errno 12\] Cannot allocate memory|MemoryError: Unable to allocate [\d.]+ [KMGT]iB",
        source="torch (CPU)", cause=Cause.HOST_MEMORY, get_sizes=sizes.read_host_request,
    ),
    make_signature(
        "shm",
        "insufficient shared memory|out of shared memory|torch_shm|write to shm|unable to open shared"
        "|failed to extend /dev/shm|posix_fallocate failed|creating shared memory segment",
        r"failed to extend /dev/shm/nccl|posix_fallocate failed ?: ?No space left on device"
        r"|creating shared memory segment.{0,120}No space left on device"
        r"|insufficient shared memory \(shm\)|workers are out of shared memory"
        r"|unable to (?:write to|open|mmap|resize) (?:file|shared memory).{0,80}(?:torch_|shm|No space)"
        r"|No space left on device.{0,40}shm",
        source="torch (DataLoader)", cause=Cause.SHARED_MEMORY, priority=0,
    ),
    make_signature(
        "bus-error", "killed by signal: Bus error", r"DataLoader worker \(pid[^)]*\)+ is killed by signal: Bus error",
        source="torch (DataLoader)", cause=Cause.SHARED_MEMORY,
    ),
    make_signature(
        "kernel", "Out of memory: Kill|oom-kill:|oom_reaper|Memory cgroup out of memory|invoked oom-killer",
        r"Out of memory: Kill(?:ed)? process \d+|oom-kill:constraint|Memory cgroup out of memory|invoked oom-killer",
        source="the kernel", cause=Cause.HOST_KILLED,
    ),
    make_signature(
        "orchestrator",
        "OOMKilled|oom_kill event|oom-kill event|OOM Killed|out-of-memory handler|due to the node running low on memory"
        "|due to memory pressure (OOM)|the memory usage threshold|SYSTEM_OOM",
        r"OOMKilled|[Oo]ut.?[Oo]f.?[Mm]emory handler|oom[-_]kill event|OOM Killed|node running low on memory"
        r"|killed due to memory pressure|exceeds the memory usage threshold",
        source="the scheduler", cause=Cause.HOST_KILLED,
    ),
    make_signature(
        "worker-killed", "is killed by signal: Killed", r"DataLoader worker \(pid[^)]*\)+ is killed by signal: Killed",
        source="torch (DataLoader)", cause=Cause.HOST_KILLED, priority=2,
    ),
    make_signature(
        "exit-code",
        "return code = -9|exitcode: -9|exitcode  : -9|exitcode -9|exit code 137|exit status 137|exit code: 137|SIGKILL"
        "|status code 137|exited with code 137|Exit Code: 137|exit code -9",
        r"return code = -9\b|exit ?code ?[:=]? ?-9\b|[Ss]ignal 9:? ?\(?SIGKILL|Signals\.SIGKILL"
        r"|(?:exit|exited|status|Exit).{0,14}\b137\b|terminated by signal SIGKILL|exitcode=-9",
        source="the system", cause=Cause.HOST_KILLED, priority=3,
    ),
    make_signature(
        "killed", "Killed", r"(?:^|[\s\])|*])Killed(?:\*\*|[.!])?(?:\s{2,}\S.{0,120})?$", source="the shell",
        cause=Cause.HOST_KILLED, priority=3, is_one_line=True,
    ),
    make_signature(
        "torch-oom-bare", "CUDA out of memory|HIP out of memory|XPU out of memory|OutOfMemoryError",
        r"(?:CUDA|HIP|XPU) out of memory|torch(?:\.cuda)?\.OutOfMemoryError", source="torch", cause=Cause.DEVICE_MEMORY,
        priority=2,
    ),
)  # fmt: skip
