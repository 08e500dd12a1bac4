"""Activation functions whose CUDA kernels keep other tensors than the generic ones."""

from __future__ import annotations

from typing import Any

import torch

from memprof.virtual.kernels.registry import kernel
from memprof.virtual.launch import Launch

_aten = torch.ops.aten


@kernel(_aten.log_sigmoid_forward)
def log_sigmoid_forward(launch: Launch) -> Any:
    """The buffer for the backward is empty on CUDA (native/cuda/Activation.cpp); the CPU fills one."""
    data = launch.args[0]
    if not data.is_meta:
        return NotImplemented
    result = (torch.empty_like(data), data.new_empty(0))
    launch.record(*result)
    return result
