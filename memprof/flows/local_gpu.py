"""The GPU of this machine, as options for a virtual GPU. Not in gpus.py, whose imports slow down cached results."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from memprof.device.catalog import find_gpu
from memprof.device.context import CONTEXT_BYTES
from memprof.device.nvml import read_gpus
from memprof.device.visible import find_first_visible_gpu
from memprof.errors import UsageError


class LocalGpu(NamedTuple):
    """The GPU of this machine that a measured run would use."""

    name: str
    total_bytes: int
    usable_bytes: int  # for torch's allocator: free memory less a CUDA context


def make_gpu_options(name: str, total_bytes: int) -> dict[str, Any]:
    """Return options for a virtual GPU: the catalog's GPU of this name and capacity, else only the capacity."""
    try:
        entry = find_gpu(name)
    except UsageError:
        return {"gpu_vram_bytes": total_bytes}
    # A slice of a GPU (MIG) may have the name of the whole GPU.
    is_same_size = abs(entry.total_bytes - total_bytes) * 50 < total_bytes
    return {"gpu": entry.key} if is_same_size else {"gpu_vram_bytes": total_bytes}


def find_local_gpu_options() -> dict[str, Any]:
    """Return options for a virtual GPU like the first GPU of NVML; empty if NVML finds no GPU.

    A process uses one slice of a sliced GPU (MIG): the slice in CUDA_VISIBLE_DEVICES, or the first.
    """
    gpu = next(iter(read_gpus().gpus), None)
    if gpu is not None and gpu.slices:
        visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        slices = [gpu_slice for gpu_slice in gpu.slices if gpu_slice.total_bytes is not None]
        slices.sort(key=lambda gpu_slice: not gpu_slice.uuid or gpu_slice.uuid not in visible_devices)
        return {"gpu_vram_bytes": slices[0].total_bytes} if slices else {}
    return {} if gpu is None or gpu.usable_bytes is None else make_gpu_options(gpu.name, gpu.usable_bytes)


def find_local_gpu() -> LocalGpu | None:
    """Return the first GPU that CUDA would use, as NVML reports it; None if NVML lacks a value.

    CUDA is not initialized: a process that has initialized CUDA cannot be forked.
    """
    gpu = find_first_visible_gpu(read_gpus().gpus)
    if gpu is None or gpu.slices or gpu.usable_bytes is None or gpu.free_bytes is None:
        return None
    return LocalGpu(gpu.name, gpu.usable_bytes, max(gpu.free_bytes - _get_context_bytes(gpu.name), 0))


def _get_context_bytes(name: str) -> int:
    try:
        return find_gpu(name).context_bytes
    except UsageError:  # the GPU is not in the catalog
        return CONTEXT_BYTES
