"""GPUs, their processes and their memory, as plain data: what `device/nvml.py` reads. All amounts are bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One process with a context on a GPU. `used_bytes` is None where the driver does not say."""

    pid: int
    name: str
    used_bytes: int | None
    kind: str  # "compute" or "graphics"; one that is both is compute.
    gpu_instance: int | None = None  # Of a sliced GPU (MIG).


@dataclass(frozen=True, slots=True)
class Slice:
    """One MIG device of a GPU. Amounts are None where the caller may not read them."""

    index: int
    name: str
    uuid: str
    gpu_instance: int | None
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class NvmlGpu:
    """One GPU. An amount that NVML does not give is None; `notes` says why if it is one of memory."""

    # NVML's, in the order of the PCI bus; CUDA's ordinal may differ (CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER).
    index: int
    name: str  # as `torch.cuda.get_device_properties(i).name`.
    uuid: str = ""  # "GPU-...", what names the GPU for good.
    total_bytes: int | None = None  # all memory; `used`, `free` and `reserved` sum to it.
    used_bytes: int | None = None  # in use by all processes and their contexts, what nvidia-smi shows.
    free_bytes: int | None = None  # what can still be had.
    # kept by driver and firmware; None if the driver is too old to tell it from `used_bytes`.
    reserved_bytes: int | None = None
    utilisation_percent: int | None = None  # share of the last sample period in which a kernel ran.
    temperature_celsius: int | None = None
    power_watts: float | None = None
    compute_capability: tuple[int, int] | None = None  # major and minor.
    slices: tuple[Slice, ...] = ()  # MIG devices, if the GPU is sliced.
    processes: tuple[GpuProcess, ...] = ()  # those that NVML lists, largest first.
    notes: tuple[str, ...] = ()  # one line for each thing that could not be read.

    @property
    def usable_bytes(self) -> int | None:
        """Return what CUDA reports as the GPU's capacity: what the driver keeps is not in it."""
        return None if self.total_bytes is None else self.total_bytes - (self.reserved_bytes or 0)


@dataclass(frozen=True, slots=True)
class NvmlSample:
    """All GPUs at one moment. Without any, `notes` says why."""

    gpus: tuple[NvmlGpu, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None  # The newest CUDA that the driver can run, such as "13.0".
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """The use of one GPU's memory, and the processes that use it. Amounts are None if they cannot be read."""

    total_bytes: int | None
    used_bytes: int | None  # by all processes
    by_process: tuple[GpuProcess, ...] = ()  # those that NVML lists, largest first; of a slice, those on it
    own_bytes: int | None = None  # what this process uses, None if NVML does not list it
    note: str = ""  # why something is None; empty if nothing is
