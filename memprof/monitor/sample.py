"""Data classes for one sample of the GPUs and a watched command. All amounts are bytes.

Allocated and reserved are counters of torch's CUDA caching allocator (`torch.cuda.memory_stats`). A counter has a peak
since the program began or reset the peak, but no peak per sample: where the peak rose since the last sample,
the interval's peak is exact; where the peak did not rise, the interval's peak is the highest of ten readings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from memprof.device.gpus import NvmlGpu
from memprof.trace.json_values import JsonValue


@dataclass(frozen=True, slots=True)
class Allocator:
    """CUDA allocator of one process on one device."""

    device: int  # CUDA's ordinal in that process
    name: str  # of the GPU; empty if torch does not say
    uuid: str  # of the GPU; empty if torch does not say
    total_bytes: int  # of the GPU; 0 if torch does not say
    requested_bytes: int | None  # requested bytes of live tensors; None where torch does not count them
    allocated_bytes: int  # bytes of live blocks
    reserved_bytes: int  # held from the driver
    interval_peak_allocated_bytes: int  # the highest since the last sample
    interval_peak_reserved_bytes: int  # the highest since the last sample
    max_allocated_bytes: int  # the highest since the process began
    max_reserved_bytes: int  # the highest since the process began
    num_alloc_retries: int = 0  # allocations that succeeded after cached segments were released
    num_ooms: int = 0  # out-of-memory errors


@dataclass(frozen=True, slots=True)
class WatchedProcess:
    """One process of the command."""

    pid: int
    name: str
    resident_bytes: int  # host memory, with shared pages in full; 0 after the process has ended
    peak_resident_bytes: int | None  # the highest resident bytes so far
    rank: int | None = None  # rank in a distributed run (RANK); None without a rank or before CUDA is initialized
    allocators: tuple[Allocator, ...] = ()  # allocators of the devices that the process has used


@dataclass(frozen=True, slots=True)
class MonitorSample(JsonValue):
    """State of the GPUs and the command at one moment."""

    time: float  # seconds since the epoch
    elapsed: float  # seconds since memprof began to watch
    gpus: tuple[NvmlGpu, ...] = ()
    processes: tuple[WatchedProcess, ...] = ()
    notes: tuple[str, ...] = ()  # data that cannot be read, one line each

    @property
    def allocators(self) -> tuple[Allocator, ...]:
        """Return the allocators of all processes."""
        return tuple(allocator for process in self.processes for allocator in process.allocators)

    @property
    def resident_bytes(self) -> int:
        """Return the sum of the resident bytes of all processes."""
        return sum(process.resident_bytes for process in self.processes)

    def total(self, name: str) -> int | None:
        """Return the sum of the field `name` of `Allocator` over all allocators; None if there is no allocator."""
        return sum(getattr(allocator, name) for allocator in self.allocators) if self.allocators else None

    def command_bytes(self, gpu: NvmlGpu) -> int | None:
        """Return the bytes of `gpu` that NVML attributes to the command's processes, with their contexts; None if NVML
        does not report them."""
        pids = {process.pid for process in self.processes}
        known_bytes = [process.used_bytes for process in gpu.processes if process.pid in pids]
        return sum(num_bytes or 0 for num_bytes in known_bytes) if known_bytes and None not in known_bytes else None


@dataclass(slots=True)
class Peaks:
    """Peaks over a whole run, of sums over all processes; each process adds its own peak of the interval.

    For one process the peak is exact; for several, it assumes that the processes reach their peaks at the same time.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    resident_bytes: int = 0
    gpus: dict[int, int] = field(default_factory=dict)  # used bytes by NVML's index

    def add(self, sample: MonitorSample) -> None:
        """Update the peaks from `sample`."""
        self.allocated_bytes = _max_known(self.allocated_bytes, sample.total("interval_peak_allocated_bytes"))
        self.reserved_bytes = _max_known(self.reserved_bytes, sample.total("interval_peak_reserved_bytes"))
        process_peak = sample.processes[0].peak_resident_bytes if len(sample.processes) == 1 else None
        self.resident_bytes = max(self.resident_bytes, sample.resident_bytes, process_peak or 0)
        for gpu in sample.gpus:
            if gpu.used_bytes is not None:
                self.gpus[gpu.index] = max(self.gpus.get(gpu.index, 0), gpu.used_bytes)


def _max_known(*values: int | None) -> int | None:
    return max((value for value in values if value is not None), default=None)


def csv_header(gpu_indices: Iterable[int]) -> list[str]:
    """Return the column names of the log; `gpu_indices` are NVML's."""
    return list(_columns(MonitorSample(0.0, 0.0), Peaks(), gpu_indices))


def csv_row(sample: MonitorSample, peaks: Peaks, gpu_indices: Iterable[int]) -> list[object]:
    """Return the log's row for `sample`; empty strings for unknown values."""
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
    gpu_by_index = {gpu.index: gpu for gpu in sample.gpus}
    for index in gpu_indices:
        gpu = gpu_by_index.get(index, NvmlGpu(index, ""))
        columns |= {
            f"gpu{index}_used_bytes": gpu.used_bytes,
            f"gpu{index}_total_bytes": gpu.total_bytes,
            f"gpu{index}_command_bytes": sample.command_bytes(gpu),
            f"gpu{index}_utilisation_percent": gpu.utilisation_percent,
            f"gpu{index}_temperature_celsius": gpu.temperature_celsius,
            f"gpu{index}_power_watts": gpu.power_watts,
        }
    return columns
