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
    return known is not None and bool(torch.as_tensor(known).all())


@kernel(_aten.allclose, on_host=True)
def allclose(launch: Launch) -> Any:
    """All of isclose, read by the host (native/TensorCompare.cpp, allclose); true where the values are not known."""
    known = launch.values.compute(launch.func, launch.args, launch.kwargs)
    if launch.call.on_gpu:
        with launch.inside():
            _aten.isclose.default(*launch.args, **launch.kwargs).all()
    return True if known is None else known


@kernel(
    _aten._unique2,
    _aten.unique_dim,
    _aten.unique_consecutive,
    _aten.bincount,
    _aten.repeat_interleave.Tensor,  # its other overloads call this one
    on_host=True,
)
def by_value(launch: Launch) -> Any:
    """Run on the values, or as if all elements differed."""
    if not (launch.call.on_gpu or launch.call.on_host):
        return NotImplemented
    result = launch.values.compute(launch.func, launch.args, launch.kwargs)
    if result is None:
        first = launch.args[0]
        result = launch.func(_stand_in(launch, first), *launch.args[1:], **launch.kwargs)
    return launch.known(result)


def _stand_in(launch: Launch, data: torch.Tensor) -> torch.Tensor:
    """Values of which the result is as large as it can well be."""
    packet, name = launch.operator.packet, launch.operator.name
    if packet is _aten.repeat_interleave:
        size = launch.argument(1, "output_size")
        each, rest = divmod(data.numel() if size is None else size, max(1, data.numel()))
        launch.values.assume(f"{name} of unknown repeats: as if all were alike, one each unless the size is given.")
        return (each + (torch.arange(data.numel()) < rest)).to(data.dtype)
    numbers = torch.arange(data.numel())
    least = launch.argument(2, "minlength", 0) if packet is _aten.bincount else 0
    if least:
        launch.values.assume(f"{name} of unknown values: as if they were spread evenly below its minlength.")
        numbers %= least
    else:
        launch.values.assume(f"{name} of unknown values: as if all elements differed.")
    return numbers.reshape(data.shape).to(data.dtype)
