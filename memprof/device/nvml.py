"""The NVIDIA GPUs of this machine, their memory and the processes that use it, through NVML, as in nvidia-smi.

Nothing here raises. A refused value is None, and `notes` has a line with the reason: no driver, no permission, a slice
of a GPU, a GPU that is lost. This is the only file that imports pynvml.

    >>> from memprof.device.nvml import read_gpus
    >>> [(gpu.name, gpu.used_bytes) for gpu in read_gpus().gpus]  # doctest: +SKIP
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
from memprof.installer import format_install_command

_NO_INSTANCE = 0xFFFFFFFF  # NVML's instance of a process on a GPU without slices


def read_gpus() -> NvmlSample:
    """Return the current state of all GPUs."""
    with Nvml() as nvml:
        return nvml.read()


def read_gpu_usage(gpu: int | str) -> GpuUsage:
    """Return the current memory use of a GPU: in total, by process, and by this process.

    Args:
        gpu: NVML's index, or the UUID of the GPU or slice, such as `str(torch.cuda.get_device_properties(0).uuid)`; the
            prefix "GPU-" or "MIG-" may be missing. CUDA's index differs from NVML's where CUDA_VISIBLE_DEVICES is set.
    """
    with Nvml() as nvml:
        return nvml.read_usage(gpu)


class Nvml:
    """Context manager: connection to NVML, opened once for repeated reads."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._unavailable_reason = ""

    def __enter__(self) -> Nvml:
        self._open()
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def read(self) -> NvmlSample:
        """Return the current state of all GPUs. If NVML is not open, try to open it again."""
        if self._nvml is None:
            self._open()
        if self._nvml is None:
            return NvmlSample(notes=(self._unavailable_reason,))
        nvml_call = _NvmlCaller(self._nvml)
        count = nvml_call("nvmlDeviceGetCount")
        if count is None:
            self._close()
            return NvmlSample(notes=(f"NVML does not list the GPUs: {nvml_call.refusal}",))
        cuda = nvml_call("nvmlSystemGetCudaDriverVersion")
        return NvmlSample(
            gpus=tuple(self._read_gpu(index) for index in range(count)),
            driver_version=nvml_call("nvmlSystemGetDriverVersion"),
            cuda_version=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            notes=() if count else ("the driver lists no GPU",),
        )

    def read_usage(self, gpu: int | str) -> GpuUsage:
        """Return the current memory use of one GPU; `gpu` is as in the function `read_gpu_usage`."""
        sample = self.read()
        if not sample.gpus:
            return GpuUsage(None, None, note="; ".join(sample.notes))
        for candidate in sample.gpus:
            if candidate.index == gpu or (isinstance(gpu, str) and _is_same_uuid(candidate.uuid, gpu)):
                return _make_usage(candidate, candidate.total_bytes, candidate.used_bytes, candidate.processes)
            for mig_device in candidate.slices:
                if isinstance(gpu, str) and _is_same_uuid(mig_device.uuid, gpu):
                    slice_processes = tuple(
                        process for process in candidate.processes if process.gpu_instance == mig_device.gpu_instance
                    )
                    return _make_usage(candidate, mig_device.total_bytes, mig_device.used_bytes, slice_processes)
        return GpuUsage(None, None, note=f"NVML lists no GPU {gpu}: it has {len(sample.gpus)}")

    def _open(self) -> None:
        module = _import_pynvml()
        if module is None:
            command = format_install_command("nvidia-ml-py")
            self._unavailable_reason = f"GPUs cannot be seen: pynvml is not installed ({command})"
            return
        nvml_call = _NvmlCaller(module)
        nvml_call("nvmlInit")
        if nvml_call.refusal:
            self._unavailable_reason = f"GPUs cannot be seen: {_explain_refusal(module, nvml_call)}"
            return
        self._nvml = module

    def _close(self) -> None:
        if self._nvml is not None:
            _NvmlCaller(self._nvml)("nvmlShutdown")
            self._nvml = None

    def _read_gpu(self, index: int) -> NvmlGpu:
        nvml_call = _NvmlCaller(self._nvml)
        handle = nvml_call("nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            return NvmlGpu(index, f"GPU {index}", notes=(f"GPU {index} cannot be read: {nvml_call.refusal}",))
        name = _decode(nvml_call("nvmlDeviceGetName", handle)) or f"GPU {index}"
        notes: list[str] = []
        if _is_lost(self._nvml, nvml_call):
            return NvmlGpu(index, name, notes=(f"GPU {index} cannot be read: {nvml_call.refusal}",))
        mode = nvml_call("nvmlDeviceGetMigMode", handle)
        slices = self._read_slices(handle) if mode and mode[0] else ()
        memory = self._read_memory(handle)
        if memory.note and not slices:
            notes.append(f"memory of GPU {index} cannot be read: {memory.note}")
        elif memory.note:
            notes.append(f"GPU {index} is sliced (MIG), and its memory as a whole cannot be read: {memory.note}")
        processes, processes_refusal = self._read_processes(handle, is_sliced=bool(slices))
        if processes_refusal:
            notes.append(f"processes on GPU {index} cannot be listed: {processes_refusal}")
        elif not processes and memory.used and memory.used > _MAX_DRIVER_BYTES:
            notes.append(
                f"GPU {index} is in use, and no process is listed: those of other containers and of other users "
                "may be hidden"
            )
        utilisation = nvml_call("nvmlDeviceGetUtilizationRates", handle)
        power = nvml_call("nvmlDeviceGetPowerUsage", handle)
        capability = nvml_call("nvmlDeviceGetCudaComputeCapability", handle)
        if _is_lost(self._nvml, nvml_call):
            notes = [f"GPU {index} cannot be read: {nvml_call.refusal}"]
        return NvmlGpu(
            index=index,
            name=name,
            uuid=_decode(nvml_call("nvmlDeviceGetUUID", handle)),
            total_bytes=memory.total,
            used_bytes=memory.used,
            free_bytes=memory.free,
            reserved_bytes=memory.reserved,
            utilisation_percent=None if utilisation is None else int(utilisation.gpu),
            temperature_celsius=nvml_call("nvmlDeviceGetTemperature", handle, self._nvml.NVML_TEMPERATURE_GPU),
            power_watts=None if power is None else power / 1000,
            compute_capability=None if capability is None else (capability[0], capability[1]),
            slices=slices,
            processes=processes,
            notes=tuple(notes),
        )

    def _read_memory(self, handle: Any) -> _Memory:
        nvml_call = _NvmlCaller(self._nvml)
        # Version 2 separates the driver's reserved memory from used memory; drivers before 510 do not have version 2.
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        info = None if version is None else nvml_call("nvmlDeviceGetMemoryInfo", handle, version)
        if info is not None:
            total, used, free, reserved = (int(value) for value in (info.total, info.used, info.free, info.reserved))
            if reserved and used + free == total:
                used -= reserved  # the reference says in one place that `used` includes it, and in another not
            return _Memory(total, used, free, reserved)
        nvml_call = _NvmlCaller(self._nvml)
        info = nvml_call("nvmlDeviceGetMemoryInfo", handle)
        if info is None:
            return _Memory(note=nvml_call.refusal)
        return _Memory(int(info.total), int(info.used), int(info.free))

    def _read_slices(self, handle: Any) -> tuple[Slice, ...]:
        nvml_call = _NvmlCaller(self._nvml)
        slices = []
        for index in range(nvml_call("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            # Places without a slice answer "not found".
            mig_device = nvml_call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
            if mig_device is not None:
                memory = self._read_memory(mig_device)
                name = _decode(nvml_call("nvmlDeviceGetName", mig_device)) or f"slice {index}"
                uuid = _decode(nvml_call("nvmlDeviceGetUUID", mig_device))
                instance = nvml_call("nvmlDeviceGetGpuInstanceId", mig_device)
                slices.append(Slice(index, name, uuid, instance, memory.total, memory.used, memory.free))
        return tuple(slices)

    def _read_processes(self, handle: Any, *, is_sliced: bool) -> tuple[tuple[GpuProcess, ...], str]:
        nvml_call = _NvmlCaller(self._nvml)
        process_by_key: dict[tuple[int, int | None], GpuProcess] = {}
        for kind, function_name in (
            ("compute", "nvmlDeviceGetComputeRunningProcesses"),
            ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
        ):
            previous_refusal = nvml_call.refusal
            listed_processes = nvml_call(function_name, handle)
            if listed_processes is None and nvml_call.code is None:  # a driver before 510 has only the second version
                nvml_call.refusal = previous_refusal
                listed_processes = nvml_call(f"{function_name}_v2", handle)
            if kind == "graphics":
                # GPUs without a display refuse this call, and have no graphics processes.
                nvml_call.refusal = previous_refusal
            for process in listed_processes or ():
                instance = getattr(process, "gpuInstanceId", _NO_INSTANCE)
                key = (process.pid, instance if is_sliced and instance != _NO_INSTANCE else None)
                if key not in process_by_key:
                    # Both lists give the process's whole use of the GPU.
                    name = self._process_name(process.pid)
                    process_by_key[key] = GpuProcess(process.pid, name, process.usedGpuMemory, kind, key[1])
        largest_first = sorted(process_by_key.values(), key=lambda process: (-(process.used_bytes or 0), process.pid))
        return tuple(largest_first), nvml_call.refusal

    def _process_name(self, pid: int) -> str:
        """Return NVML's name of the process, or the longer name from /proc if both name the same program: in a
        container, a pid in /proc may be another process."""
        nvml_call = _NvmlCaller(self._nvml)
        nvml_name = os.path.basename(_decode(nvml_call("nvmlSystemGetProcessName", pid)).partition(" ")[0])
        name = process_name(pid)
        if name is None or (nvml_name and name.split()[0] != nvml_name):
            return nvml_name or f"process {pid}"
        return name


def _import_pynvml() -> ModuleType | None:
    try:
        with warnings.catch_warnings():
            # The abandoned package pynvml warns on import.
            warnings.simplefilter("ignore")
            import pynvml
    except ImportError:
        return None
    return pynvml  # type: ignore[no-any-return, unused-ignore]


_MAX_DRIVER_BYTES = 1 << 30  # a driver without processes reserves less


@dataclass(frozen=True, slots=True)
class _Memory:
    total: int | None = None
    used: int | None = None
    free: int | None = None
    reserved: int | None = None
    note: str = ""


@dataclass(slots=True)
class _NvmlCaller:
    """Caller of NVML functions by name. Returns None if a call fails; `refusal` is the reason for the last failure,
    `code` is NVML's error code."""

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
            # NVMLLibraryMismatchError is not an NVMLError; names need not be UTF-8; the driver may be half installed.
            self.refusal, self.code = f"{type(error).__name__}: {error}".splitlines()[0], None
        return None


def _is_lost(nvml: Any, nvml_call: _NvmlCaller) -> bool:
    return nvml_call.code in (nvml.NVML_ERROR_GPU_IS_LOST, getattr(nvml, "NVML_ERROR_RESET_REQUIRED", 16))


def _explain_refusal(nvml: Any, nvml_call: _NvmlCaller) -> str:
    """Return the reason why NVML could not be initialized, from the failed call in `nvml_call`."""
    explanations = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no NVIDIA driver is installed here (libnvidia-ml.so.1 is not found)",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is installed and not loaded",
        nvml.NVML_ERROR_NO_PERMISSION: "no permission to talk to the NVIDIA driver (/dev/nvidiactl)",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA driver was updated while loaded: restart the machine",
    }
    return explanations.get(nvml_call.code, nvml_call.refusal)


def _decode(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _is_same_uuid(first: str, second: str) -> bool:
    return bool(first) and first.lower().removeprefix("gpu-").removeprefix("mig-") == (
        second.lower().removeprefix("gpu-").removeprefix("mig-")
    )


def _make_usage(gpu: NvmlGpu, total: int | None, used: int | None, processes: tuple[GpuProcess, ...]) -> GpuUsage:
    own_processes = [process for process in processes if process.pid == os.getpid()]
    notes = list(gpu.notes)
    if not own_processes:
        notes.append("NVML does not list this process")
    elif own_processes[0].used_bytes is None:
        notes.append("the driver does not say how much each process uses")
    own_bytes = own_processes[0].used_bytes if own_processes else None
    return GpuUsage(total, used, processes, own_bytes, "; ".join(notes))
