"""Operators whose result, or its shape, depends on values."""

from __future__ import annotations

from typing import Any

import torch

from memprof.virtual.kernels.registry import kernel
from memprof.virtual.launch import Launch

_aten = torch.ops.aten


@kernel(_aten.equal, on_host=True)
def equal(launch: Launch) -> Any:
    """Read by the host; false where the values are not known."""
    known = launch.values.compute(launch.func, launch.args, launch.kwargs)
    return False if known is None else known


@kernel(_aten.allclose, on_host=True)
def allclose(launch: Launch) -> Any:
    """All of isclose, read by the host (native/TensorCompare.cpp, allclose); true where the values are not known."""
    known = launch.values.compute(launch.func, launch.args, launch.kwargs)
    if launch.call.on_gpu:
        with launch.inside():
            _aten.isclose.default(*launch.args, **launch.kwargs).all()
    return True if known is None else known


@kernel(
    _aten._unique2, _aten.unique_dim, _aten.unique_consecutive, _aten.bincount, _aten.repeat_interleave, on_host=True
)
def by_value(launch: Launch) -> Any:
    """Run on the values, or as if all elements differed."""
    if not (launch.call.on_gpu or launch.call.on_host):
        return NotImplemented
    result = launch.values.compute(launch.func, launch.args, launch.kwargs)
    if result is None:
        first = next(arg for arg in launch.args if isinstance(arg, torch.Tensor))
        stand_in = torch.arange(first.numel()).reshape(first.shape).to(first.dtype)
        launch.values.assume(f"{launch.operator.name} of unknown values: as if all elements differed.")
        result = launch.func(stand_in, *launch.args[1:], **launch.kwargs)
    return launch.known(result)
