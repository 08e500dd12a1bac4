# ruff: noqa: N802
"""A stub for libnvidia-ml.so below the real pynvml: its C functions, filling the structures that pynvml passes.

So signatures, structures, text conversion and error classes are those of the installed nvidia-ml-py.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, field
from typing import Any

import pynvml

GIB = 1 << 30
MIB = 1 << 20
NOT_AVAILABLE = pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value


@dataclass
class FakeProcess:
    pid: int
    used: int = NOT_AVAILABLE
    name: bytes | None = b"/usr/bin/python3"
    gpu_instance: int = 0xFFFFFFFF


@dataclass
class FakeGpu:
    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = "GPU-11111111-2222-3333-4444-555555555555"
    total: int = 81559 * MIB
    used: int = 2 * GIB
    reserved: int = 551 * MIB
    counts_reserved: bool = False  # As used, which some drivers do.
    compute: list[FakeProcess] = field(default_factory=list)
    graphics: list[FakeProcess] = field(default_factory=list)
    slices: list[FakeGpu] = field(default_factory=list)
    mig: bool = False
    gpu_instance: int = 0
    errors: dict[str, int] = field(default_factory=dict)  # Error code by C function; "*" for all.


class FakeDriver:
    """What `pynvml.nvmlLib` is, for as long as a test runs."""

    def __init__(self, *gpus: FakeGpu, missing: tuple[str, ...] = (), errors: dict[str, int] | None = None) -> None:
        self.gpus = list(gpus)
        self.missing = missing
        self.errors = errors or {}
        self.opened = 0
        self._by_address: dict[int, FakeGpu] = {}
        self._kept: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in self.missing or not hasattr(type(self), f"c_{name}"):
            raise AttributeError(name)
        function = getattr(self, f"c_{name}")

        def call(*arguments: Any) -> int:
            if name in self.errors:
                return self.errors[name]
            gpu = self._gpu(arguments[0]) if arguments else None
            if gpu is not None and (error := gpu.errors.get(name, gpu.errors.get("*"))):
                return error
            values = [gpu, *arguments[1:]] if gpu is not None else arguments
            return function(*values) or pynvml.NVML_SUCCESS

        return call

    def _gpu(self, handle: Any) -> FakeGpu | None:
        if isinstance(handle, pynvml.c_nvmlDevice_t) and handle:
            return self._by_address[ctypes.addressof(handle.contents)]
        return None

    def _give(self, reference: Any, gpu: FakeGpu) -> None:
        handle = ctypes.create_string_buffer(8)
        self._kept.append(handle)
        self._by_address[ctypes.addressof(handle)] = gpu
        ctypes.memmove(
            reference, ctypes.byref(ctypes.c_void_p(ctypes.addressof(handle))), ctypes.sizeof(ctypes.c_void_p)
        )

    # -- the library ---------------------------------------------------------------------------------------------------

    def c_nvmlInitWithFlags(self, flags):
        self.opened += 1

    def c_nvmlShutdown(self):
        self.opened -= 1

    def c_nvmlSystemGetDriverVersion(self, buffer, length):
        buffer.value = b"580.65.06"

    def c_nvmlSystemGetCudaDriverVersion(self, version):
        version._obj.value = 12080

    def c_nvmlSystemGetProcessName(self, pid, buffer, length):
        known = {process.pid: process.name for gpu in self.gpus for process in [*gpu.compute, *gpu.graphics]}
        if known.get(pid.value) is None:
            return pynvml.NVML_ERROR_NOT_FOUND
        buffer.value = known[pid.value]
        return 0

    def c_nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.gpus)

    def c_nvmlDeviceGetHandleByIndex_v2(self, index, device):
        self._give(device, self.gpus[index.value])

    # -- one GPU ------------------------------------------------------------------------------------------------------

    def c_nvmlDeviceGetName(self, gpu, buffer, length):
        buffer.value = gpu.name.encode()

    def c_nvmlDeviceGetUUID(self, gpu, buffer, length):
        buffer.value = gpu.uuid.encode()

    def c_nvmlDeviceGetMemoryInfo(self, gpu, memory):
        info = memory._obj
        info.total, info.used, info.free = gpu.total, gpu.used + gpu.reserved, gpu.total - gpu.used - gpu.reserved

    def c_nvmlDeviceGetMemoryInfo_v2(self, gpu, memory):
        info = memory._obj
        assert info.version == pynvml.nvmlMemory_v2
        info.total, info.reserved = gpu.total, gpu.reserved
        info.used = gpu.used + gpu.reserved * gpu.counts_reserved
        info.free = gpu.total - gpu.used - gpu.reserved

    def c_nvmlDeviceGetUtilizationRates(self, gpu, rates):
        rates._obj.gpu, rates._obj.memory = 87, 40

    def c_nvmlDeviceGetTemperature(self, gpu, sensor, value):
        value._obj.value = 65

    def c_nvmlDeviceGetPowerUsage(self, gpu, value):
        value._obj.value = 412_300

    def c_nvmlDeviceGetCudaComputeCapability(self, gpu, major, minor):
        major._obj.value, minor._obj.value = 9, 0

    def c_nvmlDeviceGetMigMode(self, gpu, current, pending):
        current._obj.value = pending._obj.value = int(gpu.mig)

    def c_nvmlDeviceGetMaxMigDeviceCount(self, gpu, count):
        count._obj.value = 7 if gpu.mig else 0

    def c_nvmlDeviceGetMigDeviceHandleByIndex(self, gpu, index, device):
        if index.value >= len(gpu.slices):
            return pynvml.NVML_ERROR_NOT_FOUND
        self._give(device, gpu.slices[index.value])
        return 0

    def c_nvmlDeviceGetGpuInstanceId(self, gpu, value):
        value._obj.value = gpu.gpu_instance

    def c_nvmlDeviceGetComputeRunningProcesses_v2(self, gpu, count, array):
        return _fill(gpu.compute, count, array)

    def c_nvmlDeviceGetComputeRunningProcesses_v3(self, gpu, count, array):
        return _fill(gpu.compute, count, array)

    def c_nvmlDeviceGetGraphicsRunningProcesses_v2(self, gpu, count, array):
        return _fill(gpu.graphics, count, array)

    def c_nvmlDeviceGetGraphicsRunningProcesses_v3(self, gpu, count, array):
        return _fill(gpu.graphics, count, array)


def _fill(processes: list[FakeProcess], count: Any, array: Any) -> int:
    if not processes:
        count._obj.value = 0
        return 0
    if array is None:
        count._obj.value = len(processes)
        return pynvml.NVML_ERROR_INSUFFICIENT_SIZE
    for place, process in zip(itertools.count(), processes, strict=False):
        array[place].pid = process.pid
        array[place].usedGpuMemory = process.used
        array[place].gpuInstanceId = process.gpu_instance
        array[place].computeInstanceId = 0xFFFFFFFF
    count._obj.value = len(processes)
    return 0
