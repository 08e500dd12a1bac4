"""The NVIDIA GPUs of this machine, their memory and who uses it: through NVML, as nvidia-smi.

Nothing here raises. What NVML refuses is None, and `notes` has a line that says why: no driver, no permission, a slice
of a GPU, a GPU that is lost. This is the only file that imports pynvml.

    >>> from memprof.device.nvml import read_gpus
    >>> [(GPU.name, GPU.used_bytes) for GPU in read_gpus().GPUs]  # doctest: +SKIP
    [('NVIDIA H100 80GB HBM3', 2_516_582_400)]

Source of what the calls mean: NVML API reference (docs.nvidia.com/deploy/nvml-api), and pynvml.py of nvidia-ml-py.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from memprof.device.gpus import GpuProcess, GpuUsage, NvmlGpu, NvmlSample, Slice
from memprof.device.processes import process_name

_NO_INSTANCE = 0xFFFFFFFF  # what NVML gives as the instance of a process on a GPU that is not sliced


def read_gpus() -> NvmlSample:
    """Return all GPUs now."""
    with Nvml() as nvml:
        return nvml.read()


def read_gpu_usage(gpu: int | str) -> GpuUsage:
    """Return how much of a GPU is used now, by whom, and by this process.

    Args:
        GPU: NVML's index, or better the UUID of the GPU or slice, with or without its "GPU-" or "MIG-", which is
            `str(torch.cuda.get_device_properties(0).uuid)`: CUDA's ordinal is not NVML's index where
            CUDA_VISIBLE_DEVICES is set.
    """
    with Nvml() as nvml:
        return nvml.use(gpu)


class Nvml:
    """NVML held open, for reading again and again: a context manager."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._why_not = ""

    def __enter__(self) -> Nvml:
        self._open()
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def read(self) -> NvmlSample:
        """Return all GPUs now. A driver that went away is looked for again at the next call."""
        if self._nvml is None:
            self._open()
        if self._nvml is None:
            return NvmlSample(notes=(self._why_not,))
        asked = _NvmlCaller(self._nvml)
        count = asked("nvmlDeviceGetCount")
        if count is None:
            self._close()
            return NvmlSample(notes=(f"NVML does not list the GPUs: {asked.refusal}",))
        cuda = asked("nvmlSystemGetCudaDriverVersion")
        return NvmlSample(
            gpus=tuple(self._gpu(index) for index in range(count)),
            driver_version=asked("nvmlSystemGetDriverVersion"),
            cuda_version=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            notes=() if count else ("the driver lists no GPU",),
        )

    def use(self, gpu: int | str) -> GpuUsage:
        """Return what `read_gpu_usage` does."""
        reading = self.read()
        if not reading.gpus:
            return GpuUsage(None, None, note="; ".join(reading.notes))
        for found in reading.gpus:
            if found.index == gpu or (isinstance(gpu, str) and _same_uuid(found.uuid, gpu)):
                return _use(found, found.total_bytes, found.used_bytes, found.processes)
            for piece in found.slices:
                if isinstance(gpu, str) and _same_uuid(piece.uuid, gpu):
                    on_it = tuple(process for process in found.processes if process.gpu_instance == piece.gpu_instance)
                    return _use(found, piece.total_bytes, piece.used_bytes, on_it)
        return GpuUsage(None, None, note=f"NVML lists no GPU {gpu}: it has {len(reading.gpus)}")

    def _open(self) -> None:
        module = _pynvml()
        if module is None:
            self._why_not = "GPUs cannot be seen: pynvml is not installed (pip install nvidia-ml-py)"
            return
        asked = _NvmlCaller(module)
        asked("nvmlInit")
        if asked.refusal:
            self._why_not = f"GPUs cannot be seen: {_hint(module, asked)}"
            return
        self._nvml = module

    def _close(self) -> None:
        if self._nvml is not None:
            _NvmlCaller(self._nvml)("nvmlShutdown")
            self._nvml = None

    def _gpu(self, index: int) -> NvmlGpu:
        asked = _NvmlCaller(self._nvml)
        handle = asked("nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            return NvmlGpu(index, f"GPU {index}", notes=(f"GPU {index} cannot be read: {asked.refusal}",))
        name = _text(asked("nvmlDeviceGetName", handle)) or f"GPU {index}"
        notes: list[str] = []
        if _is_lost(self._nvml, asked):
            return NvmlGpu(index, name, notes=(f"GPU {index} cannot be read: {asked.refusal}",))
        mode = asked("nvmlDeviceGetMigMode", handle)
        slices = self._slices(handle) if mode and mode[0] else ()
        memory = self._memory(handle)
        if memory.note and not slices:
            notes.append(f"memory of GPU {index} cannot be read: {memory.note}")
        elif memory.note:
            notes.append(f"GPU {index} is sliced (MIG), and its memory as a whole cannot be read: {memory.note}")
        processes, why = self._processes(handle, sliced=bool(slices))
        if why:
            notes.append(f"processes on GPU {index} cannot be listed: {why}")
        elif not processes and memory.used and memory.used > _UNEXPLAINED:
            notes.append(
                f"GPU {index} is in use, and no process is listed: those of other containers and of other users "
                "may be hidden"
            )
        utilisation = asked("nvmlDeviceGetUtilizationRates", handle)
        power = asked("nvmlDeviceGetPowerUsage", handle)
        capability = asked("nvmlDeviceGetCudaComputeCapability", handle)
        if _is_lost(self._nvml, asked):
            notes = [f"GPU {index} cannot be read: {asked.refusal}"]
        return NvmlGpu(
            index=index,
            name=name,
            uuid=_text(asked("nvmlDeviceGetUUID", handle)),
            total_bytes=memory.total,
            used_bytes=memory.used,
            free_bytes=memory.free,
            reserved_bytes=memory.reserved,
            utilisation_percent=None if utilisation is None else int(utilisation.gpu),
            temperature_celsius=asked("nvmlDeviceGetTemperature", handle, self._nvml.NVML_TEMPERATURE_GPU),
            power_watts=None if power is None else power / 1000,
            compute_capability=None if capability is None else (capability[0], capability[1]),
            slices=slices,
            processes=processes,
            notes=tuple(notes),
        )

    def _memory(self, handle: Any) -> _Memory:
        asked = _NvmlCaller(self._nvml)
        # Version 2 tells what the driver keeps from what is used; drivers before 510 do not have it.
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        found = None if version is None else asked("nvmlDeviceGetMemoryInfo", handle, version)
        if found is not None:
            total, used, free, reserved = (int(n) for n in (found.total, found.used, found.free, found.reserved))
            if reserved and used + free == total:
                used -= reserved  # the reference says in one place that `used` includes it, and in another not
            return _Memory(total, used, free, reserved)
        asked = _NvmlCaller(self._nvml)
        found = asked("nvmlDeviceGetMemoryInfo", handle)
        if found is None:
            return _Memory(note=asked.refusal)
        return _Memory(int(found.total), int(found.used), int(found.free))

    def _slices(self, handle: Any) -> tuple[Slice, ...]:
        asked = _NvmlCaller(self._nvml)
        slices = []
        for index in range(asked("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            # Places without a slice answer "not found".
            piece = asked("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
            if piece is not None:
                memory = self._memory(piece)
                name = _text(asked("nvmlDeviceGetName", piece)) or f"slice {index}"
                uuid = _text(asked("nvmlDeviceGetUUID", piece))
                instance = asked("nvmlDeviceGetGpuInstanceId", piece)
                slices.append(Slice(index, name, uuid, instance, memory.total, memory.used, memory.free))
        return tuple(slices)

    def _processes(self, handle: Any, *, sliced: bool) -> tuple[tuple[GpuProcess, ...], str]:
        asked = _NvmlCaller(self._nvml)
        found: dict[tuple[int, int | None], GpuProcess] = {}
        for kind, call in (
            ("compute", "nvmlDeviceGetComputeRunningProcesses"),
            ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
        ):
            before = asked.refusal
            listed = asked(call, handle)
            if listed is None and asked.code is None:  # a driver from before 510 has the second version alone
                asked.refusal = before
                listed = asked(f"{call}_v2", handle)
            if kind == "graphics":
                # GPUs without a display refuse this, and nothing is missing then.
                asked.refusal = before
            for process in listed or ():
                instance = getattr(process, "gpuInstanceId", _NO_INSTANCE)
                key = (process.pid, instance if sliced and instance != _NO_INSTANCE else None)
                if key not in found:
                    # Both lists give the process's whole use of the GPU.
                    name = self._name(process.pid)
                    found[key] = GpuProcess(process.pid, name, process.usedGpuMemory, kind, key[1])
        largest_first = sorted(found.values(), key=lambda process: (-(process.used_bytes or 0), process.pid))
        return tuple(largest_first), asked.refusal

    def _name(self, pid: int) -> str:
        """Return NVML's name, made clearer by /proc if that is the same process and not another container's."""
        asked = _NvmlCaller(self._nvml)
        told = os.path.basename(_text(asked("nvmlSystemGetProcessName", pid)).partition(" ")[0])
        name = process_name(pid)
        if name is None or (told and name.split()[0] != told):
            return told or f"process {pid}"
        return name


def _pynvml() -> ModuleType | None:
    try:
        with warnings.catch_warnings():
            # The abandoned package of the same name warns when it is imported.
            warnings.simplefilter("ignore")
            import pynvml
    except ImportError:
        return None
    return pynvml  # type: ignore[no-any-return, unused-ignore]


_UNEXPLAINED = 1 << 30  # a driver without any process keeps less than this


@dataclass(frozen=True, slots=True)
class _Memory:
    total: int | None = None
    used: int | None = None
    free: int | None = None
    reserved: int | None = None
    note: str = ""


@dataclass(slots=True)
class _NvmlCaller:
    """Calls NVML by name: None for what it refuses, and `refusal` says in a few words why the last one was."""

    nvml: Any
    refusal: str = ""
    code: int | None = None

    def __call__(self, name: str, *arguments: Any) -> Any:
        function: Callable[..., Any] | None = getattr(self.nvml, name, None)
        if function is None:
            self.refusal, self.code = f"this release of nvidia-ml-py has no {name}", None
            return None
        try:
            return function(*arguments)
        except self.nvml.NVMLError as error:
            self.refusal, self.code = str(error).rstrip("."), error.value
        except Exception as error:
            # NVMLLibraryMismatchError is none of NVML's own; names need not be UTF-8; the driver may be half installed.
            self.refusal, self.code = f"{type(error).__name__}: {error}".splitlines()[0], None
        return None


def _is_lost(nvml: Any, asked: _NvmlCaller) -> bool:
    return asked.code in (nvml.NVML_ERROR_GPU_IS_LOST, getattr(nvml, "NVML_ERROR_RESET_REQUIRED", 16))


def _hint(nvml: Any, asked: _NvmlCaller) -> str:
    """Return why NVML cannot be opened, in words that say what to do."""
    known = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no NVIDIA driver is installed here (libnvidia-ml.so.1 is not found)",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is installed and not loaded",
        nvml.NVML_ERROR_NO_PERMISSION: "no permission to talk to the NVIDIA driver (/dev/nvidiactl)",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA driver was updated while loaded: restart the machine",
    }
    return known.get(asked.code, asked.refusal)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _same_uuid(one: str, other: str) -> bool:
    return bool(one) and one.lower().removeprefix("gpu-").removeprefix("mig-") == (
        other.lower().removeprefix("gpu-").removeprefix("mig-")
    )


def _use(gpu: NvmlGpu, total: int | None, used: int | None, processes: tuple[GpuProcess, ...]) -> GpuUsage:
    own = [process for process in processes if process.pid == os.getpid()]
    notes = list(gpu.notes)
    if not own:
        notes.append("NVML does not list this process")
    elif own[0].used_bytes is None:
        notes.append("the driver does not say how much each process uses")
    return GpuUsage(total, used, processes, own[0].used_bytes if own else None, "; ".join(notes))
