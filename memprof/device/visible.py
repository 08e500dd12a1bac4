"""The GPUs that are visible to this process (CUDA_VISIBLE_DEVICES)."""

from __future__ import annotations

import os
from collections.abc import Sequence

from memprof.device.gpus import NvmlGpu
from memprof.device.nvml import read_gpus

VARIABLE = "CUDA_VISIBLE_DEVICES"


def hide_gpus() -> None:
    """Hide all GPUs from CUDA in this process and its children; call before CUDA's first use.

    For commands that only simulate: where torch sees a GPU, autograd has GPU threads that do not survive a fork
    (`track_bad_autograd_forks`, torch/csrc/autograd/engine.cpp), so that simulated runs could not run in parallel.
    """
    if read_gpus().gpus:
        os.environ[VARIABLE] = ""


def find_first_visible_gpu(gpus: Sequence[NvmlGpu]) -> NvmlGpu | None:
    """Return the GPU of NVML's that is CUDA's first; None where no GPU is visible, or the first is a slice (MIG).

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    visible = os.environ.get(VARIABLE)
    if visible is None:
        return gpus[0] if gpus else None
    name = visible.partition(",")[0].strip()
    if name.isdecimal():
        return gpus[int(name)] if int(name) < len(gpus) else None
    return next((gpu for gpu in gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)), None)
