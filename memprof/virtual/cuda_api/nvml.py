"""Patches of pynvml and of its copies, by which NVML reports virtual GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from memprof.device.catalog import Gpu
from memprof.patching import Extension, Patch
from memprof.virtual.cuda_api.driver import UUID
from memprof.virtual.gpus import Gpus
from memprof.virtual.install_context import InstallContext

_P2P_OK, _P2P_NOT_SUPPORTED = 0, 5  # NVML_P2P_STATUS_OK, NVML_P2P_STATUS_NOT_SUPPORTED (nvml.h)


class Pynvml(Extension):
    """Patches of the functions of pynvml."""

    imports = ("pynvml", "vllm.third_party.pynvml")  # the latter is vLLM's copy

    def make_module_patches(self, module: ModuleType, context: InstallContext) -> Iterator[Patch]:
        """Yield patches by which the functions of pynvml report virtual GPUs."""
        for name, replacement in _make_replacements(context.gpu, context.gpus, context.used_bytes).items():
            if hasattr(module, name):
                yield module, name, replacement


def _make_replacements(gpu: Gpu, gpus: Gpus, used_bytes: Callable[[str], int]) -> dict[str, Any]:
    """Return the replacement of each function of pynvml by name; `used_bytes` returns the bytes in use on a device."""
    handles = [SimpleNamespace(index=index) for index in range(gpus.num_gpus)]

    def get_memory_info(device: Any, version: Any = None) -> Any:
        used = used_bytes(gpus.get_name(device.index))
        return SimpleNamespace(total=gpu.total_bytes, used=used, free=max(0, gpu.total_bytes - used), reserved=0)

    def list_processes(device: Any) -> list[Any]:
        return [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=used_bytes(gpus.get_name(device.index)), gpuInstanceId=None)
        ]

    return {
        "nvmlInit": lambda: None,
        "nvmlInitWithFlags": lambda flags: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: gpus.num_gpus,
        "nvmlDeviceGetHandleByIndex": lambda index: handles[gpus.index(index)],
        "nvmlDeviceGetHandleByUUID": lambda uuid: handles[0],
        "nvmlDeviceGetIndex": lambda device: device.index,
        "nvmlDeviceGetName": lambda device: gpu.name,
        "nvmlDeviceGetUUID": lambda device: f"GPU-{UUID}",
        "nvmlDeviceGetMemoryInfo": get_memory_info,
        "nvmlDeviceGetUtilizationRates": lambda device: SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetTemperature": lambda device, sensor=0: 0,
        "nvmlDeviceGetPowerUsage": lambda device: 0,
        "nvmlDeviceGetCudaComputeCapability": lambda device: list(gpu.compute_capability),
        "nvmlDeviceGetComputeRunningProcesses": list_processes,
        "nvmlDeviceGetP2PStatus": lambda device, other, capability: (
            _P2P_OK if gpu.nvlink_bandwidth else _P2P_NOT_SUPPORTED
        ),
    }
