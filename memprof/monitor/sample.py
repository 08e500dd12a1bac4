"""A sample of the GPUs and of a watched command at one moment. Plain data; all amounts are bytes.

Allocated and reserved are those of torch's CUDA caching allocator (`torch.cuda.memory_stats`). Its counters have a
highest value since the program began, or reset them, but none for the last second: where it rose, it is the highest of
that second, exactly; where it did not, the second's highest lies below it, and `interval_peak` is the highest of ten
readings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from memprof.device.gpus import NvmlGpu
from memprof.trace.json_values import JsonValue


@dataclass(frozen=True, slots=True)
class Allocator:
    """One process's CUDA allocator on one device."""

    device: int  # CUDA's ordinal in that process
    name: str  # of the GPU; empty if torch does not say
    uuid: str  # of the GPU; empty if torch does not say
    total_bytes: int  # of the GPU; 0 if torch does not say
    requested_bytes: int | None  # of living tensors, as requested; None on releases that do not count it
    allocated_bytes: int  # of their blocks
    reserved_bytes: int  # held from the driver
    interval_peak_allocated_bytes: int  # the highest since the last sample
    interval_peak_reserved_bytes: int  # the highest since the last sample
    max_allocated_bytes: int  # the highest since the process began
    max_reserved_bytes: int  # the highest since the process began
    num_alloc_retries: int = 0  # times that the GPU was full, and giving the cache back was enough
    num_ooms: int = 0  # out-of-memory errors


@dataclass(frozen=True, slots=True)
class WatchedProcess:
    """One process of the command."""

    pid: int
    name: str
    resident_bytes: int  # host memory, pages shared with other processes counted in full; 0 once it has ended
    peak_resident_bytes: int | None  # the highest of that so far
    rank: int | None = None  # of a distributed run (RANK), None if it has none or has not initialised CUDA
    allocators: tuple[Allocator, ...] = ()  # of the devices that it has used


@dataclass(frozen=True, slots=True)
class MonitorSample(JsonValue):
    """One moment."""

    time: float  # seconds since the epoch
    elapsed: float  # seconds since memprof began to watch
    gpus: tuple[NvmlGpu, ...] = ()
    processes: tuple[WatchedProcess, ...] = ()
    notes: tuple[str, ...] = ()  # what cannot be seen, one line each

    @property
    def allocators(self) -> tuple[Allocator, ...]:
        """Return the allocators of all processes."""
        return tuple(allocator for process in self.processes for allocator in process.allocators)

    @property
    def resident_bytes(self) -> int:
        """Return the resident bytes of all processes together."""
        return sum(process.resident_bytes for process in self.processes)

    def total(self, name: str) -> int | None:
        """A field of `Allocator` over all allocators; None if there is none."""
        return sum(getattr(allocator, name) for allocator in self.allocators) if self.allocators else None

    def by_command(self, gpu: NvmlGpu) -> int | None:
        """Return the bytes of a GPU that NVML attributes to the command's processes, their contexts included."""
        pids = {process.pid for process in self.processes}
        used = [process.used_bytes for process in gpu.processes if process.pid in pids]
        return sum(amount or 0 for amount in used) if used and None not in used else None


@dataclass(slots=True)
class Peaks:
    """The highest of a whole run: of the sum over all processes, of which each adds its own highest of the second.

    For one process that is exact; for several it is what they need if they reach their highest at the same moment.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    resident_bytes: int = 0
    gpus: dict[int, int] = field(default_factory=dict)  # used bytes by NVML's index

    def add(self, sample: MonitorSample) -> None:
        """Take a sample in."""
        self.allocated_bytes = _highest(self.allocated_bytes, sample.total("interval_peak_allocated_bytes"))
        self.reserved_bytes = _highest(self.reserved_bytes, sample.total("interval_peak_reserved_bytes"))
        if len(sample.processes) == 1:
            self.resident_bytes = max(self.resident_bytes, sample.processes[0].peak_resident_bytes or 0)
        self.resident_bytes = max(self.resident_bytes, sample.resident_bytes)
        for gpu in sample.gpus:
            if gpu.used_bytes is not None:
                self.gpus[gpu.index] = max(self.gpus.get(gpu.index, 0), gpu.used_bytes)


def _highest(one: int | None, other: int | None) -> int | None:
    return max((amount for amount in (one, other) if amount is not None), default=None)


def csv_header(gpu_indices: Iterable[int]) -> list[str]:
    """The columns of a log for these GPUs."""
    return list(_columns(MonitorSample(0.0, 0.0), Peaks(), gpu_indices))


def csv_row(sample: MonitorSample, peaks: Peaks, gpu_indices: Iterable[int]) -> list[object]:
    """The values of those columns; what is not known is empty."""
    return ["" if value is None else value for value in _columns(sample, peaks, gpu_indices).values()]


def _columns(sample: MonitorSample, peaks: Peaks, gpu_indices: Iterable[int]) -> dict[str, object]:
    columns: dict[str, object] = {
        "time": datetime.fromtimestamp(sample.time, UTC).isoformat(timespec="milliseconds"),
        "elapsed_seconds": f"{sample.elapsed:.3f}",
        "processes": len(sample.processes),
        "resident_bytes": sample.resident_bytes,
        "cuda_processes": sum(1 for process in sample.processes if process.allocators),
        **{name: sample.total(name) for name in ("allocated_bytes", "reserved_bytes")},
        **{name: sample.total(name) for name in ("interval_peak_allocated_bytes", "interval_peak_reserved_bytes")},
        "peak_allocated_bytes": peaks.allocated_bytes,
        "peak_reserved_bytes": peaks.reserved_bytes,
        "alloc_retries": sample.total("num_alloc_retries"),
        "ooms": sample.total("num_ooms"),
    }
    by_index = {gpu.index: gpu for gpu in sample.gpus}
    for index in gpu_indices:
        gpu = by_index.get(index, NvmlGpu(index, ""))
        columns |= {
            f"gpu{index}_used_bytes": gpu.used_bytes,
            f"gpu{index}_total_bytes": gpu.total_bytes,
            f"gpu{index}_command_bytes": sample.by_command(gpu),
            f"gpu{index}_utilisation_percent": gpu.utilisation_percent,
            f"gpu{index}_temperature_celsius": gpu.temperature_celsius,
            f"gpu{index}_power_watts": gpu.power_watts,
        }
    return columns
