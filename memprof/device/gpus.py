"""Data classes for GPUs, their processes and their memory, as read by `device/nvml.py`. All amounts are bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One process with a context on a GPU. `used_bytes` is None where the driver does not report it."""

    pid: int
    name: str
    used_bytes: int | None
    kind: str  # "compute" or "graphics"; a process of both kinds is "compute".
    gpu_instance: int | None = None  # Of a sliced GPU (MIG).


@dataclass(frozen=True, slots=True)
class Slice:
    """One MIG device of a GPU. An amount is None if this process has no permission to read it."""

    index: int
    name: str
    uuid: str
    gpu_instance: int | None
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class NvmlGpu:
    """One GPU, as NVML reports it. Unreported values are None; for memory, `notes` has the reason."""

    # NVML's index, in the order of the PCI bus; CUDA's ordinal may differ (CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER).
    index: int
    name: str  # as `torch.cuda.get_device_properties(i).name`.
    uuid: str = ""  # "GPU-...", the permanent id of the GPU.
    total_bytes: int | None = None  # all memory; `used_bytes`, `free_bytes` and `reserved_bytes` sum to it.
    used_bytes: int | None = None  # in use by all processes and their contexts, what nvidia-smi shows.
    free_bytes: int | None = None  # available memory.
    # kept by driver and firmware; None if the driver is too old to tell it from `used_bytes`.
    reserved_bytes: int | None = None
    utilisation_percent: int | None = None  # share of the last sample period in which a kernel ran.
    temperature_celsius: int | None = None
    power_watts: float | None = None
    compute_capability: tuple[int, int] | None = None  # major and minor.
    slices: tuple[Slice, ...] = ()  # MIG devices, if the GPU is sliced.
    processes: tuple[GpuProcess, ...] = ()  # NVML's processes, largest first.
    notes: tuple[str, ...] = ()  # one line for each thing that could not be read.

    @property
    def usable_bytes(self) -> int | None:
        """Return the capacity that CUDA reports: total memory without the driver's reserved part."""
        return None if self.total_bytes is None else self.total_bytes - (self.reserved_bytes or 0)


@dataclass(frozen=True, slots=True)
class NvmlSample:
    """All GPUs of the machine at one moment. If there are none, `notes` has the reason."""

    gpus: tuple[NvmlGpu, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None  # The newest CUDA that the driver can run, such as "13.0".
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """Memory use of one GPU, and the processes that use the GPU. Amounts are None if they cannot be read."""

    total_bytes: int | None
    used_bytes: int | None  # by all processes
    by_process: tuple[GpuProcess, ...] = ()  # NVML's processes on the GPU or slice, largest first
    own_bytes: int | None = None  # bytes of this process, None if NVML does not list the process
    note: str = ""  # reason for a None; may be empty
