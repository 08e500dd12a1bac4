"""Operators that change a tensor's shape or strides in place, and tensors that have a shape and no memory."""

from __future__ import annotations

from typing import Any

import torch

from memprof.virtual.kernels.registry import kernel
from memprof.virtual.launch import Launch

_aten = torch.ops.aten


@kernel(
    _aten.t_,
    _aten.transpose_,
    _aten.swapaxes_,
    _aten.swapdims_,
    _aten.squeeze_,
    _aten.unsqueeze_,
    _aten.as_strided_,
    _aten.detach_,
    on_host=True,
)
def restride(launch: Launch) -> Any:
    """These change the very tensor: to be done each time, however often seen before."""
    return launch.func(*launch.args, **launch.kwargs)


@kernel(_aten._efficientzerotensor, on_host=True)
def zero_tensor(launch: Launch) -> Any:
    """Zeros that have a shape and no memory on any device (native/TensorFactories.cpp, _efficientzerotensor)."""
    result = launch.func(*launch.args, **launch.kwargs)
    result.untyped_storage().resize_(0)
    return result
