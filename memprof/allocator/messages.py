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

    def add_process_bytes(self, context_bytes: int) -> OomReport:
        """Return the report with `process_bytes`, as NVML shows it: the CUDA context plus reserved memory."""
        return replace(self, process_bytes=self.reserved_bytes + context_bytes)

    def message(self, release: Release = LATEST) -> str:
        """Return the message of torch.cuda.OutOfMemoryError in `release`."""
        allowed = "" if self.allowed_bytes is None else f"{format_size(self.allowed_bytes)} allowed; "
        if self.requested_bytes >= ONE_EXABYTE:
            return "CUDA out of memory. Tried to allocate more than 1EB memory."
        if release.version < (2, 1):
            return (
                f"CUDA out of memory. Tried to allocate {format_size(self.tried_bytes)} (GPU {self.device}; "
                f"{format_size(self.total_bytes)} total capacity; {format_size(self.allocated_bytes)} already "
                f"allocated; {format_size(self.free_bytes)} free; {allowed}"
                f"{format_size(self.reserved_bytes)} reserved in total by PyTorch){release.oom_advice}"
            )
        process = private = ""
        if self.process_bytes is not None:
            process = (
                f"Including non-PyTorch memory, this process has {format_size(self.process_bytes)} memory in use. "
            )
        if self.private_pool_bytes:
            private = f"with {format_size(self.private_pool_bytes)} allocated in private pools (e.g., CUDA Graphs), "
        return (
            f"CUDA out of memory. Tried to allocate {format_size(self.tried_bytes)}. GPU {self.device} "
            f"{release.capacity_phrase} {format_size(self.total_bytes)} of which {format_size(self.free_bytes)} is "
            f"free. {process}{allowed}Of the allocated memory {format_size(self.allocated_bytes)} is allocated by "
            f"PyTorch, {private}and {format_size(self.reserved_bytes - self.allocated_bytes)} is reserved by PyTorch "
            f"but unallocated.{release.oom_advice}"
        )


class OutOfMemory(MemprofError):
    """An allocation failed, as torch.cuda.OutOfMemoryError."""

    exit_code = 3

    def __init__(self, report: OomReport, release: Release = LATEST) -> None:
        super().__init__(report.message(release))
        self.report = report
