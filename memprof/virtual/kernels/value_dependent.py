"""Operators whose results have shapes that depend on values, and operators that change strides in place."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.copies import copy_bytes
from memprof.virtual.kernels.registry import aten, kernel
from memprof.virtual.kernels.sorting import radix_sort_bytes, run_length_bytes, scan_bytes
from memprof.virtual.values import budget

_TOO_LARGE_ASSUMPTION = (
    "A result of unique, bincount or repeat_interleave beyond 1 GiB is not computed: it is as large as the values say, "
    "and as if all elements differed where they are not known."
)


@kernel(aten.equal, on_host=True)
def equal(launch: KernelContext) -> Any:
    """Return whether two tensors are equal, False if values are unknown (native/cuda/Equal.cpp)."""
    known_result = launch.values.evaluator.compute(launch.func, launch.args, launch.kwargs)
    first, second = launch.args
    if launch.call.on_gpu and first.shape == second.shape and first.numel() and first is not second:
        with launch.inside():
            aten.eq.Tensor(first, second).all()
    return known_result is not None and bool(torch.as_tensor(known_result).all())


@kernel(aten.allclose, on_host=True)
def allclose(launch: KernelContext) -> Any:
    """Return whether two tensors are close, True if values are unknown (native/TensorCompare.cpp, allclose)."""
    known_result = launch.values.evaluator.compute(launch.func, launch.args, launch.kwargs)
    if launch.call.on_gpu:
        with launch.inside():
            aten.isclose.default(*launch.args, **launch.kwargs).all()
    return True if known_result is None else known_result


@kernel(aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount, on_host=True)
@kernel(aten.repeat_interleave.Tensor, on_host=True)  # its other overloads call this one
def run_on_values(launch: KernelContext) -> Any:
    """Run the operator on the values of its input or, if they are unknown, on values that all differ."""
    if not (launch.call.on_gpu or launch.call.on_host):
        return NotImplemented
    data = launch.args[0]
    if launch.call.on_gpu and data.numel():
        _check_values(launch, data)
    length = _find_result_length(launch, data)
    if max(length, data.numel()) * torch.int64.itemsize > budget.MAX_TENSOR_BYTES:
        launch.values.assume(_TOO_LARGE_ASSUMPTION)
        result = _make_results(launch, data, length)
    else:
        result = launch.values.evaluator.compute(launch.func, launch.args, launch.kwargs)
        if result is None:
            result = launch.func(_make_stub_values(launch, data), *launch.args[1:], **launch.kwargs)
    is_flat = launch.operator.packet is aten._unique2 or (
        launch.operator.packet is aten.unique_consecutive and launch.argument(3, "dim") is None
    )
    if is_flat and launch.call.on_gpu and data.numel() and data.dtype is not torch.bool:
        return _make_unique_results(launch, data, *result)
    return launch.make_virtual(result)


def _check_values(launch: KernelContext, data: torch.Tensor) -> None:
    """Run the operators by which CUDA checks values: minimum and maximum for bincount (native/cuda/SummaryOps.cu), sums
    and signs of repeats for repeat_interleave (native/Repeat.cpp)."""
    with launch.inside():
        if launch.operator.packet is aten.bincount:
            for reduce in (aten.min.default, aten.max.default):
                reduce(data)
        elif launch.operator.packet is aten.repeat_interleave:
            sums = data.cumsum(0)
            if launch.argument(1, "output_size") is None:
                data.ge(0).all()
            del sums


def _make_unique_results(
    launch: KernelContext, data: torch.Tensor, elements: Any, inverse_indices: Any, counts: Any
) -> tuple[torch.Tensor, ...]:
    """Return new results of `unique`, and allocate its sorted copy (native/cuda/UniqueCub.cu). The storages of
    `elements` and `counts` are as long as the input."""
    is_consecutive = launch.operator.packet is aten.unique_consecutive
    options = (
        launch.argument(position, name, False) for position, name in enumerate(_OPTIONS, 1 if is_consecutive else 2)
    )
    return_inverse, return_counts = options
    count, itemsize, gpu = data.numel(), data.element_size(), launch.gpu

    def make_with_capacity(value: torch.Tensor) -> torch.Tensor:
        buffer = value.new_empty(count)
        buffer[: len(value)] = value
        view: torch.Tensor = launch.make_virtual(buffer).narrow(0, 0, len(value))
        return view

    with contextlib.ExitStack() as stack:
        stack.enter_context(launch.scratch(*copy_bytes(data), 0 if is_consecutive else count * itemsize))
        if not is_consecutive:
            with launch.scratch(8 * count if return_inverse else 0):
                stack.enter_context(launch.scratch(8 * count if return_inverse else 0))
                launch.transients(radix_sort_bytes(count, itemsize, 8 if return_inverse else 0, 8 * itemsize, gpu))
        inverse_indices = launch.make_virtual(inverse_indices)
        if return_inverse:
            with launch.scratch((4 if is_consecutive else 8) * count):
                launch.transients(scan_bytes(count, 4, gpu, "sum of int32"))
        elements = make_with_capacity(elements)
        stack.enter_context(launch.scratch(8))
        if return_counts:
            counts = make_with_capacity(counts)
            launch.transients(run_length_bytes(count))
        else:
            counts = launch.make_virtual(counts)
            launch.transients(scan_bytes(count, 4, gpu, f"unique of int{32 if itemsize <= 4 else 64}"))
    return elements, inverse_indices, counts


_OPTIONS = ("return_inverse", "return_counts")


def _find_result_length(launch: KernelContext, data: torch.Tensor) -> int:
    """Return the number of rows of the result: exact if values are known, else the largest plausible number."""
    packet = launch.operator.packet
    if packet is aten.bincount:
        min_length = launch.argument(2, "minlength", 0)
        values = launch.values.store.get(data)
        if values is not None:
            return max(min_length, 1 + int(values.max()) if values.numel() else 0)
        return min_length or data.numel()
    if packet is aten.repeat_interleave:
        size = launch.argument(1, "output_size")
        values = launch.values.store.get(data) if size is None else None
        return size if size is not None else data.numel() if values is None else int(values.sum())
    if launch.values.store.is_uniform(data):
        return min(1, data.numel())
    dim = launch.argument(1 if packet is aten.unique_dim else 3, "dim") if packet is not aten._unique2 else None
    return data.numel() if dim is None or not data.dim() else data.shape[dim]


def _make_results(launch: KernelContext, data: torch.Tensor, length: int) -> Any:
    """Return meta tensors of the operator's results, with `length` rows. Optional results not requested are empty."""
    packet = launch.operator.packet
    int64_values = torch.empty(length, dtype=torch.int64, device="meta")
    if packet is aten.repeat_interleave:
        return int64_values.to(data.dtype)
    if packet is aten.bincount:
        weights = launch.argument(1, "weights")
        return (
            int64_values
            if weights is None
            else int64_values.to(torch.float if weights.dtype is torch.float else torch.double)
        )
    if packet is aten.unique_dim:  # always makes the optional results
        dim, inverse, counts = launch.argument(1, "dim"), True, True
    else:
        start = 2 if packet is aten._unique2 else 1
        dim = None if packet is aten._unique2 else launch.argument(3, "dim")
        inverse = launch.argument(start, "return_inverse", False)
        counts = launch.argument(start + 1, "return_counts", False)
    if dim is None:
        elements, inverse_shape = data.new_empty(length), data.shape
    else:
        shape = list(data.shape)
        shape[dim] = length
        elements, inverse_shape = data.new_empty(shape), data.shape[dim : dim + 1 or None]
    empty_indices = int64_values[:0]
    inverse_indices = torch.empty(inverse_shape, dtype=torch.int64, device="meta") if inverse else empty_indices
    return elements, inverse_indices, int64_values if counts else empty_indices


def _make_stub_values(launch: KernelContext, data: torch.Tensor) -> torch.Tensor:
    """Return values for unknown `data` that make the result as large as plausible."""
    packet, name = launch.operator.packet, launch.operator.name
    if packet is aten.repeat_interleave:
        output_size = launch.argument(1, "output_size")
        num_repeats, num_extra = divmod(data.numel() if output_size is None else output_size, max(1, data.numel()))
        launch.values.assume(f"{name} of unknown repeats: as if all were alike, one each unless the size is given.")
        return (num_repeats + (torch.arange(data.numel()) < num_extra)).to(data.dtype)
    int64_values = torch.arange(data.numel())
    min_length = launch.argument(2, "minlength", 0) if packet is aten.bincount else 0
    if min_length:
        launch.values.assume(f"{name} of unknown values: as if they were spread evenly below its minlength.")
        int64_values %= min_length
    else:
        launch.values.assume(f"{name} of unknown values: as if all elements differed.")
    return int64_values.reshape(data.shape).to(data.dtype)


@kernel(aten.t_, aten.transpose_, aten.swapaxes_, aten.swapdims_, on_host=True)
@kernel(aten.squeeze_, aten.unsqueeze_, aten.as_strided_, aten.detach_, on_host=True)
def change_metadata(launch: KernelContext) -> Any:
    """Change the metadata of the tensor object in place. The result is not cached: the call must run."""
    return launch.func(*launch.args, **launch.kwargs)


@kernel(aten._efficientzerotensor, on_host=True)
def zero_tensor(launch: KernelContext) -> Any:
    """Return zeros with a shape and no memory (native/TensorFactories.cpp, _efficientzerotensor)."""
    result = launch.func(*launch.args, **launch.kwargs)
    result.untyped_storage().resize_(0)
    return result
