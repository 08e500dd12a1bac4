"""Selections, counts and rolls: what their CUDA kernels call inside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memprof.virtual.card import Card
from memprof.virtual.kernels.sorting import scan_scratch

if TYPE_CHECKING:
    from memprof.virtual.calls import Call, Operator
    from memprof.virtual.recording import RecordingMode
    from memprof.watch.recorder import Place

_aten = torch.ops.aten
_META = torch.device("meta")


def masked_select(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """Indexing by the mask, broadcast (native/cuda/IndexKernel.cpp, masked_select_out_cuda_impl)."""
    data, mask = call.args
    if not (data.is_meta and mask.is_meta):
        return NotImplemented
    data, mask = torch.broadcast_tensors(*(t.unsqueeze(0) if t.dim() == 0 else t for t in (data, mask)))
    with mode:
        return _aten.index.Tensor(data, [mask])


def median(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """The median of all elements: from a sorted copy (native/cuda/Sorting.cpp, median_impl)."""
    if call.func not in (_aten.median.default, _aten.nanmedian.default) or not call.on_gpu or not call.args[0].numel():
        return NotImplemented
    data = call.args[0]
    with mode:
        ordered = _aten.sort.default(data.reshape(-1))[0]
        if operator.packet is _aten.median:
            middle = ordered[(data.numel() - 1) // 2]
            return torch.where(ordered[-1].isnan(), ordered[-1], middle)
        position = _aten.rsub.Scalar(ordered.isnan().sum(), data.numel() - 1).div(2).to(torch.int64)
        return _aten.index.Tensor(ordered, [position])


def allclose(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """All of isclose, read by the host (native/TensorCompare.cpp, allclose); true where the values are not known."""
    known = mode.values.compute(call.func, call.args, call.kwargs)
    if call.on_gpu:
        with mode:
            _aten.isclose.default(*call.args, **call.kwargs).all()
    return True if known is None else known


def isin(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """Few test elements are compared with each element, many are sorted (native/TensorCompare.cpp, isin)."""
    if call.func is not _aten.isin.Tensor_Tensor or not call.on_gpu or call.real:
        return NotImplemented
    elements, tests = call.args[:2]
    invert = call.kwargs.get("invert", False)
    if not elements.numel() or tests.numel() >= 10 * elements.numel() ** 0.145:
        return NotImplemented
    with mode:
        result = torch.empty(elements.shape, dtype=torch.bool, device=_META)
        compared = tests.view([1] * elements.dim() + [-1])
        column = elements.unsqueeze(-1)
        found = column.ne(compared).all(-1) if invert else column.eq(compared).any(-1)
        return result.copy_(found)


def count_nonzero(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """The sum of what differs from zero (native/TensorAdvancedIndexing.cpp, count_nonzero_cuda)."""
    if not call.on_gpu or "out" in call.kwargs:
        return NotImplemented
    dims = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    with mode:
        return _aten.sum.dim_IntList(_aten.ne.Scalar(call.args[0], 0), dims)


def roll(mode: RecordingMode, operator: Operator, call: Call, place: Place) -> Any:
    """Several dimensions are rolled one after the other, each into a new tensor (native/TensorTransformations.h)."""
    data, shifts = call.args[:2]
    dims = call.args[2] if len(call.args) > 2 else []
    if not call.on_gpu or len(dims) < 2 or "out" in call.kwargs:
        return NotImplemented
    with mode:
        for shift, dim in zip(shifts, dims, strict=True):
            data = _aten.roll.default(data, [shift], [dim])
    return data


def scatter_reduce(args: Any, card: Card) -> list[int]:
    """The mean counts what came together (native/TensorAdvancedIndexing.cpp, scatter_reduce_two)."""
    data, source, reduce = args[0], args[3], args[4]
    if reduce != "mean":
        return []
    item = data.element_size()
    return [source.numel() * item, data.numel() * item, data.numel()]


def masked_scatter(args: Any, card: Card) -> list[int]:
    """Where each selected element's source lies: a scan of the mask as int64 (native/cuda/IndexKernel.cu)."""
    count = args[0].numel()
    return [8 * count, scan_scratch(count, 8)]


def unfold_backward(args: Any, card: Card) -> list[int]:
    """Where windows overlap, the positions along the unfolded dimension (native/UnfoldBackward.h)."""
    sizes, dim, size, step = args[1:5]
    return [8 * sizes[dim]] if step < size and sizes else []


HANDLERS: dict[Any, Any] = {
    _aten.masked_select: masked_select,
    _aten.median: median,
    _aten.nanmedian: median,
    _aten.isin: isin,
    _aten.allclose: allclose,
    _aten.count_nonzero: count_nonzero,
    _aten.roll: roll,
}
TEMPORARIES: dict[Any, Any] = {
    _aten.masked_scatter: masked_scatter,
    _aten.masked_scatter_: masked_scatter,
    _aten.scatter_reduce: scatter_reduce,
    _aten.scatter_reduce_: scatter_reduce,
    _aten.unfold_backward: unfold_backward,
}
