"""Indexing by tensors and masks, and embeddings: the indices of a mask, and the sort of indices before accumulation.

The backward pass of an embedding sorts the indices and sums the rows of equal indices in steps. For more than 3,072
indices, a run of equal indices is summed in parts, one float32 row per part. The buffer for the parts is sized for the
worst case, not for the actual indices: gigabytes with a large vocabulary.
Sources: native/cuda/Embedding.cu, native/cuda/EmbeddingBackwardKernel.cu.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from memprof.trace.events import HOST
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.engine import is_in_backward
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels import sorting
from memprof.virtual.kernels.copies import contiguous, make_copies_formula
from memprof.virtual.kernels.reductions import reduction_buffers
from memprof.virtual.kernels.registry import META, aten, input_copies, kernel, scratch
from memprof.virtual.operator_call import OpKind, find_tensors


@kernel(aten.nonzero, on_host=True)
def nonzero(launch: KernelContext) -> Any:
    """Make the indices, and allocate the buffers by which CUDA counts and selects."""
    mask = launch.args[0]
    if not mask.is_meta:
        return NotImplemented
    return _select_indices(launch, mask, lambda: launch.make_virtual(launch.values.policy.find_selected_indices(mask)))


def _select_indices(launch: KernelContext, mask: torch.Tensor, select: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the result of `select`, the indices of `mask`, and allocate CUB's buffers for the count (before) and the
    selection (after; native/cuda/Nonzero.cu)."""
    count = mask.numel()
    if not count or not launch.call.on_gpu or launch.device == HOST:
        return select()
    launch.wait()
    with launch.scratch(*contiguous(mask), 4):
        launch.transients(sorting.reduce_bytes(count, launch.gpu))
        indices = select()
        if mask.dim():
            launch.transients(sorting.scan_bytes(count, 4, launch.gpu, "flagged"))
    return indices


@kernel(aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, on_host=True)
def index(launch: KernelContext) -> Any:
    """Index by the nonzero indices of each mask, which CUDA allocates during the call."""
    indices = launch.args[1]
    value = launch.args[2] if len(launch.args) > 2 else None
    if not launch.args[0].is_meta and any(t.is_meta for t in launch.call.tensors if t.dim() or t is not value):
        # A host tensor may not be indexed by device tensors: the CPU kernel would read device addresses.
        if launch.call.on_gpu:
            launch.note_mismatch()
        real_indices = [None if i is None else launch.values.policy.read(i) for i in indices]
        other_arguments = [launch.values.policy.read(a) if isinstance(a, torch.Tensor) else a for a in launch.args[2:]]
        return launch.func(launch.args[0], real_indices, *other_arguments, **launch.kwargs)
    if isinstance(value, torch.Tensor) and not value.is_meta and value.numel() > 1 and launch.args[0].is_meta:
        # A value of one element may be on the host, a larger value may not (native/TensorAdvancedIndexing.cpp).
        launch.note_mismatch()
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if not masks or not (launch.call.on_gpu or launch.call.on_host):
        return NotImplemented
    if value is not None and _fills_a_mask(launch, masks):
        if launch.operator.kind is OpKind.IN_PLACE:
            launch.values.write(launch.func, launch.args, launch.kwargs, launch.args[0])
            return launch.args[0]
        # index_put: a clone that is changed in place.
        result = torch.empty_like(launch.args[0])
        launch.record(result)
        launch.values.propagate(launch.func, launch.args, launch.kwargs, [result])
        return result
    expanded: list[torch.Tensor | None] = []
    selected: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            expanded.append(index)
            selected.append(index)
            continue
        columns = launch.values.policy.find_selected_indices(index)
        if _writes_fewer(launch, index, columns):
            columns = columns[: launch.args[2].shape[0]]
        # One tensor of all coordinates; the columns are the indices (IndexingUtils.h, expandTensors).
        coordinates = _select_indices(launch, index, functools.partial(_make_coordinates, launch, columns))
        expanded += coordinates.unbind(0)
        selected += columns.unbind(1)
    args = (launch.args[0], expanded, *launch.args[2:])
    known = (launch.args[0], selected, *launch.args[2:])
    if launch.operator.kind is OpKind.IN_PLACE:
        launch.values.write(launch.func, known, launch.kwargs, launch.args[0])
        return launch.func(*args, **launch.kwargs)
    result = launch.func(*args, **launch.kwargs)
    launch.record(*find_tensors(result))
    launch.values.propagate(launch.func, known, launch.kwargs, find_tensors(result))
    return result


def _make_coordinates(launch: KernelContext, columns: torch.Tensor) -> torch.Tensor:
    coordinates = torch.empty(tuple(columns.shape)[::-1], dtype=torch.int64, device=META)
    launch.record(coordinates, op="aten.nonzero")
    return coordinates


def _writes_fewer(launch: KernelContext, mask: torch.Tensor, columns: torch.Tensor) -> bool:
    """Return whether `x[mask] = rows` has fewer rows than an unknown mask selects: the mask then selects that many."""
    value = launch.args[2] if len(launch.args) > 2 else None
    if value is None or value.numel() < 2 or value.dim() != 1 + launch.args[0].dim() - mask.dim():
        return False
    return 1 < value.shape[0] < len(columns) and launch.values.store.get(mask) is None


def _fills_a_mask(launch: KernelContext, masks: list[torch.Tensor]) -> bool:
    """Return whether `x[mask] = number` runs as masked_fill_, without indices: a single mask, and a number on the
    host, such as a Python number (native/TensorAdvancedIndexing.cpp, canDispatchToMaskedFill)."""
    value, accumulates = launch.args[2], launch.argument(3, "accumulate", False)
    is_single_mask = len(masks) == 1 and all(index is None or index is masks[0] for index in launch.args[1])
    if accumulates or not is_single_mask or value.numel() != 1:
        return False
    # In code below an operator (DTensor's), where no function mode sees an assignment, C++ treats a virtual tensor as a
    # meta tensor, and makes the Python number a meta tensor too (python_variable_indexing.cpp).
    return not value.is_meta or launch.get_allocating_operator(value) == "aten.scalar_tensor"


@scratch(aten.index_put, aten.index_put_, aten._index_put_impl_)
def index_put_accumulate(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes by which an accumulating index_put sorts (native/cuda/Indexing.cu, index_put_with_sort_kernel).

    In order: the maximum, minimum and range check of each index, where bounds are checked (not by autograd, which calls
    another operator without a mode); the linear index (wrapped, times the stride, summed over dimensions; host indices
    are moved after that); copies of values that are expanded or not contiguous; sorted and original positions; a range;
    CUB's scratch. The order is of recorded runs with one index tensor.
    """
    data = args[0]
    indices = [index for index in args[1] if index is not None]
    if not (len(args) > 3 and args[3]) or not indices:
        return []
    count = torch.broadcast_shapes(*(index.shape for index in indices)).numel()
    slice_size = math.prod(
        size for size, index in zip(data.shape, [*args[1], *[None] * data.dim()], strict=False) if index is None
    )
    bits = sorting.count_key_bits(max(1, data.numel() // max(1, slice_size)))
    sort = sorting.radix_sort_bytes(count, 8, 8, bits, gpu)
    on_gpu = sum(index.is_meta for index in indices)
    bounds_buffers: list[int] = []
    if not is_in_backward() and not (len(args) > 4 and args[4]):
        for index in indices:
            if index.is_meta and index.numel():
                bounds_buffers += [8, *reduction_buffers(index, None, 8, gpu), 1] * 2
    linear_index_buffers = [8 * count] * (max(0, 3 * on_gpu - 1) + len(indices) - on_gpu)
    values = args[2]
    num_written = count * slice_size
    value_copies = (
        [num_written * values.element_size()] if values.numel() < num_written or not values.is_contiguous() else []
    )
    return [*bounds_buffers, *linear_index_buffers, *value_copies, *[8 * count] * 3, sort]


# In number ** tensor, the number becomes a double on the GPU (native/Pow.cpp, pow.Scalar).
scratch(aten.pow)(lambda args, gpu: [] if isinstance(args[0], torch.Tensor) or args[0] == 1 else [8])


@kernel(aten.masked_fill, aten.masked_fill_, on_host=True)
def masked_fill(launch: KernelContext) -> Any:
    """Fill with a 0-dimensional host tensor, which the meta kernel rejects (native/cuda/Indexing.cu)."""
    data, mask, value = launch.args
    if not data.is_meta or not isinstance(value, torch.Tensor) or value.is_meta or value.dim():
        return NotImplemented
    with launch.inside():
        return launch.func.overloadpacket.Scalar(data, mask, value.item())


@kernel(aten.masked_select, on_host=True)
def masked_select(launch: KernelContext) -> Any:
    """Index by the broadcast mask (native/cuda/IndexKernel.cpp, masked_select_out_cuda_impl)."""
    data, mask = launch.args
    if not (data.is_meta and mask.is_meta):
        return NotImplemented
    data, mask = torch.broadcast_tensors(*(t.unsqueeze(0) if t.dim() == 0 else t for t in (data, mask)))
    with launch.inside():
        return aten.index.Tensor(data, [mask])


@scratch(aten.scatter_reduce, aten.scatter_reduce_)
def scatter_reduce(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of the counts of a mean (native/TensorAdvancedIndexing.cpp, scatter_reduce_two)."""
    data, source, reduce = args[0], args[3], args[4]
    if reduce != "mean":
        return []
    item = data.element_size()
    return [source.numel() * item, data.numel() * item, data.numel()]


@scratch(aten.masked_scatter, aten.masked_scatter_)
def masked_scatter(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of an int64 scan of the mask, which finds each element's source, and of contiguous copies of the
    broadcast mask and the source (native/cuda/IndexKernel.cu)."""
    mask, source = torch.broadcast_tensors(args[1], args[0])[0], args[2]
    count = mask.numel()
    return [8 * count, *contiguous(mask, source), sorting.scan_bytes(count, 8, gpu, "sum of int64")]


# Indices that cannot be viewed flat are copied (native/Embedding.cpp, embedding).
embedding_copy = input_copies(aten.embedding)(make_copies_formula(1))

_FEW_INDICES = 3072
_MAX_MODE = 2  # mode="max" of an embedding bag
_ROWS_PER_PART = 10  # rows of equal indices that one thread adds up (NROWS_PER_THREAD)


@kernel(aten.embedding_dense_backward)
def embedding_dense_backward(launch: KernelContext) -> Any:
    """Make the dense gradient of the table, and allocate the buffers of the sort and the sums."""
    grad, indices, rows, _, by_frequency = launch.args
    if not (grad.is_meta and indices.is_meta):
        return NotImplemented
    count, item, width = indices.numel(), indices.element_size(), grad.shape[-1]
    needs_sort = count > _FEW_INDICES or by_frequency
    with contextlib.ExitStack() as stack:
        stack.enter_context(launch.scratch(*contiguous(indices, grad)))
        if needs_sort:
            # Sorted indices and original positions.
            stack.enter_context(launch.scratch(count * item, count * item))
            launch.transients(count * item, sorting.radix_sort_bytes(count, item, item, 8 * item, launch.gpu))
            if by_frequency:
                stack.enter_context(launch.scratch(count * item))
            if count:
                return _sum_segments(launch, grad, indices, rows)
        return launch.new((rows, width), grad.dtype)


def _sum_segments(launch: KernelContext, grad: torch.Tensor, indices: torch.Tensor, rows: int) -> torch.Tensor:
    """Make the gradient of a table from sorted indices, and allocate runs of equal indices and the sums of parts of
    runs (native/cuda/EmbeddingBackwardKernel.cu)."""
    count, item, width, gpu = indices.numel(), indices.element_size(), grad.shape[-1], launch.gpu
    result = launch.new((rows, width), grad.dtype)
    num_segments = min(count, rows)
    num_parts = count // _ROWS_PER_PART + num_segments
    with launch.scratch(count * item, 8):
        launch.transients(count * item, sorting.scan_bytes(count, 8, gpu, "unique by key"))
        with launch.scratch(num_segments * item, num_segments * item):
            launch.transients(sorting.scan_bytes(num_segments, item, gpu, f"sum of int{8 * item}"))
            launch.transients(8, num_parts * item, num_parts * width * max(4, grad.element_size()))
    return result


@kernel(aten._embedding_bag, aten._embedding_bag_forward_only)
def embedding_bag(launch: KernelContext) -> Any:
    """Make sizes and indices of the bags before the output (native/cuda/EmbeddingBag.cu)."""
    output, bags, sizes, largest = results = launch.func(*launch.args, **launch.kwargs)
    launch.record(sizes, bags, output, largest)
    return results


def make_embedding_bag_gradient(launch: KernelContext) -> Any:
    """Make the dense gradient of the table, for sums and means; indices are sorted with their original positions."""
    grad, indices = launch.args[:2]
    rows, by_frequency, mode = launch.args[6:9]
    count, item = indices.numel(), indices.element_size()
    if mode == _MAX_MODE or not count or not launch.call.on_gpu:
        return NotImplemented
    bits = sorting.count_key_bits(rows)
    with launch.scratch(*contiguous(indices, grad), count * item, count * item):
        launch.transients(count * item, sorting.radix_sort_bytes(count, item, item, bits, launch.gpu))
        with launch.scratch(count * item if by_frequency else 0):
            return _sum_segments(launch, grad, indices, rows)
