"""Memory of the GPU that torch's allocator does not have, as CUDA and NVML tell it."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch


def outside_bytes(device: str) -> int | None:
    """Return the bytes in use on the whole GPU, less what torch's allocator reserved; None on the CPU."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def nvml_counters() -> dict[str, Any]:
    """Return NVML's own answers about the first GPU, in bytes, to check what memprof makes of them."""
    try:
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        found: dict[str, Any] = {"own_pid": os.getpid(), "v1_used": pynvml.nvmlDeviceGetMemoryInfo(gpu).used}
    except Exception as error:  # no package, no library, no driver, no GPU
        return {"error": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(pynvml.NVMLError, AttributeError):
        memory = pynvml.nvmlDeviceGetMemoryInfo(gpu, pynvml.nvmlMemory_v2)
        found["v2"] = {name: getattr(memory, name) for name in ("total", "reserved", "free", "used")}
    with contextlib.suppress(pynvml.NVMLError):
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        found["processes"] = [(process.pid, process.usedGpuMemory) for process in processes]
    return found
