"""Selections, counts, windows and rolls: what their CUDA kernels call inside."""

from __future__ import annotations

from typing import Any

import torch

from memprof.torch_private import kernels
from memprof.virtual.card import Card
from memprof.virtual.kernels.copies import contiguous
from memprof.virtual.kernels.registry import composite, input_copies, kernel, scratch
from memprof.virtual.launch import Launch
from memprof.virtual.machine import Machine

_aten = torch.ops.aten
_META = torch.device("meta")


@kernel(_aten.median, _aten.nanmedian)
def median(launch: Launch) -> Any:
    """The median of all elements: from a sorted copy (native/cuda/Sorting.cpp, median_impl)."""
    if launch.func not in (_aten.median.default, _aten.nanmedian.default) or not launch.args[0].numel():
        return NotImplemented
    data = launch.args[0]
    with launch.inside():
        ordered = _aten.sort.default(data.reshape(-1))[0]
        if launch.operator.packet is _aten.median:
            middle = ordered[(data.numel() - 1) // 2]
            return torch.where(ordered[-1].isnan(), ordered[-1], middle)
        position = _aten.rsub.Scalar(ordered.isnan().sum(), data.numel() - 1).div(2).to(torch.int64)
        return _aten.index.Tensor(ordered, [position])


@kernel(_aten.isin)
def isin(launch: Launch) -> Any:
    """Few test elements are compared with each element, many are sorted (native/TensorCompare.cpp, isin)."""
    if launch.func is not _aten.isin.Tensor_Tensor or launch.call.real:
        return NotImplemented
    elements, tests = launch.args[:2]
    invert = launch.kwargs.get("invert", False)
    if not elements.numel() or tests.numel() >= 10 * elements.numel() ** 0.145:
        return NotImplemented
    with launch.inside():
        result = torch.empty(elements.shape, dtype=torch.bool, device=_META)
        compared = tests.view([1] * elements.dim() + [-1])
        column = elements.unsqueeze(-1)
        found = column.ne(compared).all(-1) if invert else column.eq(compared).any(-1)
        return result.copy_(found)


@kernel(_aten.count_nonzero)
def count_nonzero(launch: Launch) -> Any:
    """The sum of what differs from zero (native/TensorAdvancedIndexing.cpp, count_nonzero_cuda)."""
    if "out" in launch.kwargs:
        return NotImplemented
    dims = launch.args[1] if len(launch.args) > 1 else launch.kwargs.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    with launch.inside():
        return _aten.sum.dim_IntList(_aten.ne.Scalar(launch.args[0], 0), dims)


@kernel(_aten.roll)
def roll(launch: Launch) -> Any:
    """Several dimensions are rolled one after the other, each into a new tensor (native/TensorTransformations.h)."""
    data, shifts = launch.args[:2]
    dims = launch.args[2] if len(launch.args) > 2 else []
    if len(dims) < 2 or "out" in launch.kwargs:
        return NotImplemented
    with launch.inside():
        for shift, dim in zip(shifts, dims, strict=True):
            data = _aten.roll.default(data, [shift], [dim])
    return data


@input_copies(_aten.roll)
def roll_copy(args: Any) -> list[int]:
    """A single dimension is rolled from contiguous memory (native/cuda/TensorTransformations.cu)."""
    return contiguous(args[0])


@scratch(_aten.unfold_backward)
def unfold_backward(args: Any, card: Card) -> list[int]:
    """Where windows overlap, the positions along the unfolded dimension (native/UnfoldBackward.h)."""
    sizes, dim, size, step = args[1:5]
    return [8 * sizes[dim]] if step < size and sizes else []


@composite(kernels.one_hot)
def one_hot(machine: Machine, input: torch.Tensor, num_classes: int = -1) -> Any:
    """Ones scattered into zeros; on meta tensors C++ would compare with a range (native/Onehot.cpp)."""
    if not machine.is_on_card(input) or not input.numel() or input.dtype is not torch.int64:
        return NotImplemented
    if num_classes == -1:
        num_classes = int(input.max().item()) + 1
    result = torch.zeros((*input.shape, num_classes), dtype=torch.int64, device=input.device)
    return result.scatter_(-1, input.unsqueeze(-1), 1)
