"""The out-of-memory error that ends a run: the message's wording in each torch release, and the byte values in it.

Source: `malloc` of c10/cuda/CUDACachingAllocator.cpp, and the strings of the official wheels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from memprof.allocator.releases import LATEST, Release
from memprof.errors import MemprofError
from memprof.units import GIB, KIB, MIB

ONE_EXABYTE = 1 << 60  # requests of at least this size fail at once (`allocate` in CUDACachingAllocator.cpp)


def format_size(num_bytes: int) -> str:
    """Return a size as torch prints it: in bytes, KiB, MiB or GiB, with two decimals."""
    if num_bytes <= KIB:
        return f"{num_bytes} bytes"
    if num_bytes <= MIB:
        return f"{num_bytes / KIB:.2f} KiB"
    if num_bytes <= GIB:
        return f"{num_bytes / MIB:.2f} MiB"
    return f"{num_bytes / GIB:.2f} GiB"


@dataclass(frozen=True, slots=True)
class OomReport:
    """The values in an out-of-memory error, in bytes."""

    requested_bytes: int  # the program's request; not in the message
    tried_bytes: int  # the segment that the driver refused: the message's "Tried to allocate"
    total_bytes: int
    free_bytes: int
    allocated_bytes: int  # allocated blocks, and free ones inside private pools
    reserved_bytes: int
    private_pool_bytes: int = 0
    allowed_bytes: int | None = None  # limit set by a memory fraction
    process_bytes: int | None = None  # what NVML shows for this process
    device: int = 0
    backend: str = "cuda"  # "cuda", "hip", "xpu" or "mps"
    max_buffer_bytes: int | None = None  # of "mps": the length of Metal's buffers that the request reaches

    def add_process_bytes(self, context_bytes: int) -> OomReport:
        """Return the report with `process_bytes`, as NVML shows it: the CUDA context plus reserved memory."""
        return replace(self, process_bytes=self.reserved_bytes + context_bytes)

    def message(self, release: Release = LATEST) -> str:
        """Return the message of torch.cuda.OutOfMemoryError in `release`."""
        if self.backend == "mps":
            return self._format_mps_message()
        if self.backend == "xpu":
            return self._format_xpu_message()
        name = self.backend.upper()  # hipify replaces CUDA's name in the source
        allowed = "" if self.allowed_bytes is None else f"{format_size(self.allowed_bytes)} allowed; "
        if self.requested_bytes >= ONE_EXABYTE:
            return f"{name} out of memory. Tried to allocate more than 1EB memory."
        if release.version < (2, 1):
            return (
                f"{name} out of memory. Tried to allocate {format_size(self.tried_bytes)} (GPU {self.device}; "
                f"{format_size(self.total_bytes)} total capacity; {format_size(self.allocated_bytes)} already "
                f"allocated; {format_size(self.free_bytes)} free; {allowed}"
                f"{format_size(self.reserved_bytes)} reserved in total by PyTorch){release.oom_advice}"
            )
        process = private = ""
        if self.process_bytes is not None and self.backend != "hip":  # ROCm has no NVML: Tongyi-MAI/Z-Image, issue 103
            process = (
                f"Including non-PyTorch memory, this process has {format_size(self.process_bytes)} memory in use. "
            )
        if self.private_pool_bytes:
            private = f"with {format_size(self.private_pool_bytes)} allocated in private pools (e.g., CUDA Graphs), "
        return (
            f"{name} out of memory. Tried to allocate {format_size(self.tried_bytes)}. GPU {self.device} "
            f"{release.capacity_phrase} {format_size(self.total_bytes)} of which {format_size(self.free_bytes)} is "
            f"free. {process}{allowed}Of the allocated memory {format_size(self.allocated_bytes)} is allocated by "
            f"PyTorch, {private}and {format_size(self.reserved_bytes - self.allocated_bytes)} is reserved by PyTorch "
            f"but unallocated.{release.oom_advice}"
        )

    def _format_mps_message(self) -> str:
        """Return the message of `alloc_buffer_block` (aten/src/ATen/mps/MPSAllocator.mm), of a process in which only
        torch uses Metal. Without a limit there is no error."""
        if self.max_buffer_bytes is not None:
            return f"Invalid buffer size: {format_size(self.requested_bytes)}"
        return (
            f"MPS backend out of memory (MPS allocated: {format_size(self.reserved_bytes)}, other allocations: "
            f"{format_size(0)}, max allowed: {format_size(self.allowed_bytes or 0)}). Tried to allocate "
            f"{format_size(self.tried_bytes)} on shared pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable "
            "upper limit for memory allocations (may cause system failure)."
        )

    def _format_xpu_message(self) -> str:
        """Return the message of `malloc` (c10/xpu/XPUCachingAllocator.cpp), of a driver that reports free memory."""
        allowed = "" if self.allowed_bytes is None else f"{format_size(self.allowed_bytes)} allowed; "
        return (
            f"XPU out of memory. Tried to allocate {format_size(self.tried_bytes)}. GPU {self.device} has a total "
            f"capacity of {format_size(self.total_bytes)} of which {format_size(self.free_bytes)} is free. {allowed}Of "
            f"the allocated memory {format_size(self.allocated_bytes)} is allocated by PyTorch, and "
            f"{format_size(self.reserved_bytes - self.allocated_bytes)} is reserved by PyTorch but unallocated. Please "
            "use `empty_cache` to release all unoccupied cached memory."
        )


class MpsOutOfMemoryError(RuntimeError):
    """The plain RuntimeError that torch raises on MPS: a TORCH_CHECK of aten/src/ATen/mps/MPSAllocator.mm, where the
    allocators of CUDA and XPU raise torch.OutOfMemoryError. A class of its own: plain ones have no weak references."""

    def __reduce__(self) -> tuple[type[RuntimeError], tuple[object, ...]]:
        """Return what another process makes of the error: torch's class."""
        return RuntimeError, self.args


# As programs print it.
MpsOutOfMemoryError.__name__ = MpsOutOfMemoryError.__qualname__ = RuntimeError.__name__
MpsOutOfMemoryError.__module__ = RuntimeError.__module__


class OutOfMemory(MemprofError):
    """An allocation failed, as torch.cuda.OutOfMemoryError."""

    exit_code = 3

    def __init__(self, report: OomReport, release: Release = LATEST) -> None:
        super().__init__(report.message(release))
        self.report = report
