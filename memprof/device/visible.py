"""GPUs that CUDA shows to this process."""

from __future__ import annotations

import os
from collections.abc import Sequence

from memprof.device.gpus import NvmlGpu
from memprof.device.nvml import read_gpus

VARIABLE = "CUDA_VISIBLE_DEVICES"


def hide_gpus() -> None:
    """Let CUDA see no GPU in this process, nor in those that it starts, from before CUDA's first call.

    For commands that simulate alone: where torch sees a GPU, autograd has threads for it that outlive no fork
    (`track_bad_autograd_forks`, torch/csrc/autograd/engine.cpp), so that simulated runs could not be made side by side.
    """
    if read_gpus().gpus:
        os.environ[VARIABLE] = ""


def first_visible(gpus: Sequence[NvmlGpu]) -> NvmlGpu | None:
    """Return which of NVML's GPUs CUDA calls the first; None where none is visible, or a slice (MIG) of one.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    asked = os.environ.get(VARIABLE)
    if asked is None:
        return gpus[0] if gpus else None
    name = asked.partition(",")[0].strip()
    if name.isdecimal():
        return gpus[int(name)] if int(name) < len(gpus) else None
    return next((gpu for gpu in gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)), None)
