"""The GPU that is here, as options for a virtual one. Alone: gpus.py takes as long to import as a cached result."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from memprof.device.catalog import find_gpu
from memprof.device.context import CONTEXT_BYTES
from memprof.device.nvml import read_gpus
from memprof.device.visible import first_visible
from memprof.errors import UsageError


class LocalGpu(NamedTuple):
    """The GPU that a run would be measured on, in bytes."""

    name: str
    total_bytes: int
    usable_bytes: int  # for torch's allocator: what is free, less the context of a process that has none yet


def gpu_like(name: str, total_bytes: int) -> dict[str, Any]:
    """Return the options for a virtual GPU with this name, if the catalog has it, else with this capacity."""
    try:
        known = find_gpu(name)
    except UsageError:
        return {"gpu_vram_bytes": total_bytes}
    # A slice of a GPU (MIG) may have its name.
    same = abs(known.total_bytes - total_bytes) * 50 < total_bytes
    return {"gpu": known.key} if same else {"gpu_vram_bytes": total_bytes}


def present_gpu_options() -> dict[str, Any]:
    """Return the options for a virtual GPU like the first that NVML sees; none where it sees none.

    Of a sliced GPU (MIG) a process has one slice: that which CUDA_VISIBLE_DEVICES names, or the first.
    """
    gpu = next(iter(read_gpus().gpus), None)
    if gpu is not None and gpu.slices:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        slices = [piece for piece in gpu.slices if piece.total_bytes is not None]
        slices.sort(key=lambda piece: not piece.uuid or piece.uuid not in visible)
        return {"gpu_vram_bytes": slices[0].total_bytes} if slices else {}
    return {} if gpu is None or gpu.usable_bytes is None else gpu_like(gpu.name, gpu.usable_bytes)


def present_gpu() -> LocalGpu | None:
    """Return what NVML says of the GPU that CUDA calls the first, None where it does not tell.

    CUDA is not asked: once it has begun, a process cannot be forked any more.
    """
    gpu = first_visible(read_gpus().gpus)
    if gpu is None or gpu.slices or gpu.usable_bytes is None or gpu.free_bytes is None:
        return None
    return LocalGpu(gpu.name, gpu.usable_bytes, max(gpu.free_bytes - _context_bytes(gpu.name), 0))


def _context_bytes(name: str) -> int:
    try:
        return find_gpu(name).context_bytes
    except UsageError:  # the catalog does not have it
        return CONTEXT_BYTES
