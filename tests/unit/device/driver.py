# ruff: noqa: N802
"""A stand-in for libnvidia-ml.so below the real pynvml: its C functions, filling the structures that pynvml passes.

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
class FakeCard:
    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = "GPU-11111111-2222-3333-4444-555555555555"
    total: int = 81559 * MIB
    used: int = 2 * GIB
    reserved: int = 551 * MIB
    compute: list[FakeProcess] = field(default_factory=list)
    graphics: list[FakeProcess] = field(default_factory=list)
    slices: list[FakeCard] = field(default_factory=list)
    mig: bool = False
    gpu_instance: int = 0
    errors: dict[str, int] = field(default_factory=dict)  # Error code by C function; "*" for all.


class FakeDriver:
    """What `pynvml.nvmlLib` is, for as long as a test runs."""

    def __init__(self, *cards: FakeCard, missing: tuple[str, ...] = (), errors: dict[str, int] | None = None) -> None:
        self.cards = list(cards)
        self.missing = missing
        self.errors = errors or {}
        self.opened = 0
        self._by_address: dict[int, FakeCard] = {}
        self._kept: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in self.missing or not hasattr(type(self), f"c_{name}"):
            raise AttributeError(name)
        function = getattr(self, f"c_{name}")

        def call(*arguments: Any) -> int:
            if name in self.errors:
                return self.errors[name]
            card = self._card(arguments[0]) if arguments else None
            if card is not None and (error := card.errors.get(name, card.errors.get("*"))):
                return error
            values = [card, *arguments[1:]] if card is not None else arguments
            return function(*values) or pynvml.NVML_SUCCESS

        return call

    def _card(self, handle: Any) -> FakeCard | None:
        if isinstance(handle, pynvml.c_nvmlDevice_t) and handle:
            return self._by_address[ctypes.addressof(handle.contents)]
        return None

    def _give(self, reference: Any, card: FakeCard) -> None:
        handle = ctypes.create_string_buffer(8)
        self._kept.append(handle)
        self._by_address[ctypes.addressof(handle)] = card
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
        version._obj.value = 13000

    def c_nvmlSystemGetProcessName(self, pid, buffer, length):
        known = {process.pid: process.name for card in self.cards for process in [*card.compute, *card.graphics]}
        if known.get(pid.value) is None:
            return pynvml.NVML_ERROR_NOT_FOUND
        buffer.value = known[pid.value]
        return 0

    def c_nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.cards)

    def c_nvmlDeviceGetHandleByIndex_v2(self, index, device):
        self._give(device, self.cards[index.value])

    # -- one card ------------------------------------------------------------------------------------------------------

    def c_nvmlDeviceGetName(self, card, buffer, length):
        buffer.value = card.name.encode()

    def c_nvmlDeviceGetUUID(self, card, buffer, length):
        buffer.value = card.uuid.encode()

    def c_nvmlDeviceGetMemoryInfo(self, card, memory):
        info = memory._obj
        info.total, info.used, info.free = card.total, card.used + card.reserved, card.total - card.used - card.reserved

    def c_nvmlDeviceGetMemoryInfo_v2(self, card, memory):
        info = memory._obj
        assert info.version == pynvml.nvmlMemory_v2
        info.total, info.used, info.reserved = card.total, card.used, card.reserved
        info.free = card.total - card.used - card.reserved

    def c_nvmlDeviceGetUtilizationRates(self, card, rates):
        rates._obj.gpu, rates._obj.memory = 87, 40

    def c_nvmlDeviceGetTemperature(self, card, sensor, value):
        value._obj.value = 65

    def c_nvmlDeviceGetPowerUsage(self, card, value):
        value._obj.value = 412_300

    def c_nvmlDeviceGetCudaComputeCapability(self, card, major, minor):
        major._obj.value, minor._obj.value = 9, 0

    def c_nvmlDeviceGetMigMode(self, card, current, pending):
        current._obj.value = pending._obj.value = int(card.mig)

    def c_nvmlDeviceGetMaxMigDeviceCount(self, card, count):
        count._obj.value = 7 if card.mig else 0

    def c_nvmlDeviceGetMigDeviceHandleByIndex(self, card, index, device):
        if index.value >= len(card.slices):
            return pynvml.NVML_ERROR_NOT_FOUND
        self._give(device, card.slices[index.value])
        return 0

    def c_nvmlDeviceGetGpuInstanceId(self, card, value):
        value._obj.value = card.gpu_instance

    def c_nvmlDeviceGetComputeRunningProcesses_v2(self, card, count, array):
        return _fill(card.compute, count, array)

    def c_nvmlDeviceGetComputeRunningProcesses_v3(self, card, count, array):
        return _fill(card.compute, count, array)

    def c_nvmlDeviceGetGraphicsRunningProcesses_v2(self, card, count, array):
        return _fill(card.graphics, count, array)

    def c_nvmlDeviceGetGraphicsRunningProcesses_v3(self, card, count, array):
        return _fill(card.graphics, count, array)


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
