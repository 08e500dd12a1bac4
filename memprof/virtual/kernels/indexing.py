"""Indexing by tensors and masks, and embeddings: index tensors of masks, and sorts of indices before accumulation.

The backward pass of an embedding sorts the indices and sums the rows of equal indices in steps. For more than 3,072
indices, a run of equal indices is summed in parts, one float32 row per part. The buffer for the parts is sized for the
worst case, not for the actual indices: gigabytes with a large vocabulary. Sources: native/cuda/Embedding.cu,
native/cuda/EmbeddingBackwardKernel.cu.
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
from memprof.virtual.kernels.copies import copy_bytes, make_copies_formula
from memprof.virtual.kernels.reductions import reduction_buffers
from memprof.virtual.kernels.registry import META, aten, input_copies, kernel, scratch
from memprof.virtual.operator_call import OpKind, find_tensors


@kernel(aten.nonzero, on_host=True)
def nonzero(launch: KernelContext) -> Any:
    """Allocate the indices of nonzero elements, and CUB's buffers for counting and selecting them."""
    data = launch.args[0]
    if not data.is_meta:
        return NotImplemented
    return _select_indices(launch, data, lambda: launch.make_virtual(launch.values.policy.find_selected_indices(data)))


def _select_indices(launch: KernelContext, mask: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return `compute()`, the indices of the true elements of `mask`, and allocate CUB's buffers: for counting the
    elements before it, for selecting them after it (native/cuda/Nonzero.cu)."""
    num_elements = mask.numel()
    if not num_elements or not launch.call.on_gpu or launch.device == HOST:
        return compute()
    launch.wait()
    with launch.scratch(*copy_bytes(mask), 4):
        launch.transients(sorting.reduce_bytes(num_elements, launch.gpu))
        indices = compute()
        if mask.dim():
            launch.transients(sorting.scan_bytes(num_elements, 4, launch.gpu, "flagged"))
    return indices


@kernel(aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, on_host=True)
def index(launch: KernelContext) -> Any:
    """Index a tensor, after each mask among the indices is replaced by its nonzero indices, which CUDA allocates."""
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
    if value is not None and _is_masked_fill(launch, masks):
        if launch.operator.kind is OpKind.IN_PLACE:
            launch.values.write(launch.func, launch.args, launch.kwargs, launch.args[0])
            return launch.args[0]
        # index_put: a clone that is changed in place.
        result = torch.empty_like(launch.args[0])
        launch.record(result)
        launch.values.propagate(launch.func, launch.args, launch.kwargs, [result])
        return result
    expanded_indices: list[torch.Tensor | None] = []
    index_values: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            expanded_indices.append(index)
            index_values.append(index)
            continue
        mask_indices = launch.values.policy.find_selected_indices(index)
        if _has_fewer_rows(launch, index, mask_indices):
            mask_indices = mask_indices[: launch.args[2].shape[0]]
        # One tensor of all coordinates; the columns are the indices (IndexingUtils.h, expandTensors).
        coordinates = _select_indices(launch, index, functools.partial(_make_coordinates, launch, mask_indices))
        expanded_indices += coordinates.unbind(0)
        index_values += mask_indices.unbind(1)
    args = (launch.args[0], expanded_indices, *launch.args[2:])
    args_with_values = (launch.args[0], index_values, *launch.args[2:])
    if launch.operator.kind is OpKind.IN_PLACE:
        launch.values.write(launch.func, args_with_values, launch.kwargs, launch.args[0])
        return launch.func(*args, **launch.kwargs)
    result = launch.func(*args, **launch.kwargs)
    launch.record(*find_tensors(result))
    launch.values.propagate(launch.func, args_with_values, launch.kwargs, find_tensors(result))
    return result


def _make_coordinates(launch: KernelContext, mask_indices: torch.Tensor) -> torch.Tensor:
    coordinates = torch.empty(tuple(mask_indices.shape)[::-1], dtype=torch.int64, device=META)
    launch.record(coordinates, op="aten.nonzero")
    return coordinates


def _has_fewer_rows(launch: KernelContext, mask: torch.Tensor, mask_indices: torch.Tensor) -> bool:
    """Return whether `x[mask] = rows` has fewer rows than `mask_indices`; an unknown mask then selects `len(rows)`."""
    value = launch.args[2] if len(launch.args) > 2 else None
    if value is None or value.numel() < 2 or value.dim() != 1 + launch.args[0].dim() - mask.dim():
        return False
    return 1 < value.shape[0] < len(mask_indices) and launch.values.store.get(mask) is None


def _is_masked_fill(launch: KernelContext, masks: list[torch.Tensor]) -> bool:
    """Return whether `x[mask] = number` runs as masked_fill_, without indices: it has a single mask, and the number is
    on the host, such as a Python number (native/TensorAdvancedIndexing.cpp, canDispatchToMaskedFill)."""
    value, accumulates = launch.args[2], launch.argument(3, "accumulate", False)
    is_single_mask = len(masks) == 1 and all(index is None or index is masks[0] for index in launch.args[1])
    if accumulates or not is_single_mask or value.numel() != 1:
        return False
    # In code below an operator (DTensor's), where no function mode sees an assignment, C++ treats a virtual tensor as a
    # meta tensor, and makes the Python number a meta tensor too (python_variable_indexing.cpp).
    return not value.is_meta or launch.get_allocating_operator(value) == "aten.scalar_tensor"


@scratch(aten.index_put, aten.index_put_, aten._index_put_impl_)
def compute_index_put_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of the temporaries of an accumulating index_put (native/cuda/Indexing.cu,
    index_put_with_sort_kernel).

    In order: maximum, minimum and range check of each index, where bounds are checked (not under autograd, which calls
    another operator); the linear index (wrapped, multiplied by strides, summed over dimensions; host indices are moved
    to the GPU afterwards); copies of expanded or non-contiguous values; sorted and original positions; a range; CUB's
    scratch. The order was recorded in runs with one index tensor.
    """
    data = args[0]
    indices = [index for index in args[1] if index is not None]
    if not (len(args) > 3 and args[3]) or not indices:
        return []
    num_indices = torch.broadcast_shapes(*(index.shape for index in indices)).numel()
    slice_size = math.prod(
        size for size, index in zip(data.shape, [*args[1], *[None] * data.dim()], strict=False) if index is None
    )
    key_bits = sorting.count_key_bits(max(1, data.numel() // max(1, slice_size)))
    sort_bytes = sorting.radix_sort_bytes(num_indices, 8, 8, key_bits, gpu)
    num_gpu_indices = sum(index.is_meta for index in indices)
    bounds_buffers: list[int] = []
    if not is_in_backward() and not (len(args) > 4 and args[4]):
        for index in indices:
            if index.is_meta and index.numel():
                bounds_buffers += [8, *reduction_buffers(index, None, 8, gpu), 1] * 2
    linear_index_buffers = [8 * num_indices] * (max(0, 3 * num_gpu_indices - 1) + len(indices) - num_gpu_indices)
    values = args[2]
    num_written = num_indices * slice_size
    value_copies = (
        [num_written * values.element_size()] if values.numel() < num_written or not values.is_contiguous() else []
    )
    return [*bounds_buffers, *linear_index_buffers, *value_copies, *[8 * num_indices] * 3, sort_bytes]


# In number ** tensor, the number becomes a double on the GPU (native/Pow.cpp, pow.Scalar).
scratch(aten.pow)(lambda args, gpu: [] if isinstance(args[0], torch.Tensor) or args[0] == 1 else [8])


@kernel(aten.masked_fill, aten.masked_fill_, on_host=True)
def masked_fill(launch: KernelContext) -> Any:
    """Fill with the value of a 0-dimensional host tensor, which the meta kernel rejects (native/cuda/Indexing.cu)."""
    data, mask, value = launch.args
    if not data.is_meta or not isinstance(value, torch.Tensor) or value.is_meta or value.dim():
        return NotImplemented
    with launch.inside():
        return launch.func.overloadpacket.Scalar(data, mask, value.item())


@kernel(aten.masked_select, on_host=True)
def masked_select(launch: KernelContext) -> Any:
    """Index `data` by the broadcast mask (native/cuda/IndexKernel.cpp, masked_select_out_cuda_impl)."""
    data, mask = launch.args
    if not (data.is_meta and mask.is_meta):
        return NotImplemented
    data, mask = torch.broadcast_tensors(*(t.unsqueeze(0) if t.dim() == 0 else t for t in (data, mask)))
    with launch.inside():
        return aten.index.Tensor(data, [mask])


@scratch(aten.scatter_reduce, aten.scatter_reduce_)
def compute_scatter_reduce_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of the counts that reduce="mean" divides by (TensorAdvancedIndexing.cpp, scatter_reduce_two)."""
    data, source, reduce = args[0], args[3], args[4]
    if reduce != "mean":
        return []
    item_bytes = data.element_size()
    return [source.numel() * item_bytes, data.numel() * item_bytes, data.numel()]


@scratch(aten.masked_scatter, aten.masked_scatter_)
def compute_masked_scatter_scratch(args: Any, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of an int64 prefix sum of the mask, which gives each element its source position, and of
    contiguous copies of the broadcast mask and of the source (native/cuda/IndexKernel.cu)."""
    mask, source = torch.broadcast_tensors(args[1], args[0])[0], args[2]
    num_elements = mask.numel()
    return [8 * num_elements, *copy_bytes(mask, source), sorting.scan_bytes(num_elements, 8, gpu, "sum of int64")]


# Indices that cannot be viewed flat are copied (native/Embedding.cpp, embedding).
compute_embedding_copies = input_copies(aten.embedding)(make_copies_formula(1))

_MAX_UNSORTED_INDICES = 3072
_MAX_MODE = 2  # mode="max" of an embedding bag
_ROWS_PER_PART = 10  # rows of equal indices that one thread adds up (NROWS_PER_THREAD)


@kernel(aten.embedding_dense_backward)
def embedding_dense_backward(launch: KernelContext) -> Any:
    """Allocate the dense gradient of the embedding table, and the buffers for sorting indices and summing rows."""
    grad, indices, num_rows, _, scale_grad_by_freq = launch.args
    if not (grad.is_meta and indices.is_meta):
        return NotImplemented
    n, itemsize, width = indices.numel(), indices.element_size(), grad.shape[-1]
    needs_sort = n > _MAX_UNSORTED_INDICES or scale_grad_by_freq
    with contextlib.ExitStack() as stack:
        stack.enter_context(launch.scratch(*copy_bytes(indices, grad)))
        if needs_sort:
            # Sorted indices and original positions.
            stack.enter_context(launch.scratch(n * itemsize, n * itemsize))
            launch.transients(n * itemsize, sorting.radix_sort_bytes(n, itemsize, itemsize, 8 * itemsize, launch.gpu))
            if scale_grad_by_freq:
                stack.enter_context(launch.scratch(n * itemsize))
            if n:
                return _sum_segments(launch, grad, indices, num_rows)
        return launch.new((num_rows, width), grad.dtype)


def _sum_segments(launch: KernelContext, grad: torch.Tensor, indices: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return a new gradient of an embedding table, and allocate temporaries that sum rows of equal `indices`."""
    n, itemsize, width, gpu = indices.numel(), indices.element_size(), grad.shape[-1], launch.gpu
    result = launch.new((num_rows, width), grad.dtype)
    num_segments = min(n, num_rows)
    num_parts = n // _ROWS_PER_PART + num_segments
    with launch.scratch(n * itemsize, 8):
        launch.transients(n * itemsize, sorting.scan_bytes(n, 8, gpu, "unique by key"))
        with launch.scratch(num_segments * itemsize, num_segments * itemsize):
            launch.transients(sorting.scan_bytes(num_segments, itemsize, gpu, f"sum of int{8 * itemsize}"))
            launch.transients(8, num_parts * itemsize, num_parts * width * max(4, grad.element_size()))
    return result


@kernel(aten._embedding_bag, aten._embedding_bag_forward_only)
def embedding_bag(launch: KernelContext) -> Any:
    """Allocate bag sizes and the bag of each index before the output (native/cuda/EmbeddingBag.cu)."""
    output, offset2bag, bag_size, max_indices = results = launch.func(*launch.args, **launch.kwargs)
    launch.record(bag_size, offset2bag, output, max_indices)
    return results


def make_embedding_bag_gradient(launch: KernelContext) -> Any:
    """Return the dense gradient of the table for modes "sum" and "mean", and allocate buffers to sort the indices."""
    grad, indices = launch.args[:2]
    num_rows, scale_grad_by_freq, mode = launch.args[6:9]
    n, itemsize = indices.numel(), indices.element_size()
    if mode == _MAX_MODE or not n or not launch.call.on_gpu:
        return NotImplemented
    key_bits = sorting.count_key_bits(num_rows)
    with launch.scratch(*copy_bytes(indices, grad), n * itemsize, n * itemsize):
        launch.transients(n * itemsize, sorting.radix_sort_bytes(n, itemsize, itemsize, key_bits, launch.gpu))
        with launch.scratch(n * itemsize if scale_grad_by_freq else 0):
            return _sum_segments(launch, grad, indices, num_rows)
