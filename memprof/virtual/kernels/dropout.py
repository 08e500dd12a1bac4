"""Dropout, which keeps a boolean mask on CUDA (native/cuda/Dropout.cu)."""

from __future__ import annotations

from typing import Any

import torch

from memprof.virtual.kernels.registry import composite, kernel
from memprof.virtual.launch import Launch
from memprof.virtual.machine import Machine

_aten = torch.ops.aten


@composite(torch.dropout)
def dropout(machine: Machine, input: torch.Tensor, p: float = 0.5, train: bool = True) -> Any:
    """`torch.dropout`, whose generic path keeps a mask in the input's dtype."""
    if not (train and 0 < p < 1 and input.numel() and machine.is_on_card(input)):
        return NotImplemented
    machine.values.assume("Dropout keeps a boolean mask (CUDA's native_dropout).")
    return _aten.native_dropout(input, p, train)[0]


@kernel(_aten.native_dropout, on_host=True)
def native_dropout(launch: Launch) -> Any:
    """The result and the mask; the meta kernel would keep one in the input's dtype."""
    data = launch.args[0]
    if not data.is_meta:
        return NotImplemented
    result = (torch.empty_like(data), torch.empty_like(data, dtype=torch.bool))
    launch.record(*result)
    return result
