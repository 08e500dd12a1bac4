"""Reductions that CUDA splits over thread blocks, and the staging buffers that they need."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernels.registry import aten, scratch

_SPLIT_THREADS = 512
_MIN_VALUES_PER_THREAD = 16
_MAX_VALUES_PER_THREAD = 256
_INT32_MAX = 2**31 - 1
_PAIR_BYTES = 16  # a value and its int64 position, aligned to 8 bytes


@dataclass(frozen=True)
class Reduction:
    """A reduction as the CUDA kernel iterates: dimensions by rising stride, with adjacent dimensions merged."""

    reduced_dims: tuple[tuple[int, int], ...]  # (size, stride in elements) of the reduced dimensions
    kept_dims: tuple[tuple[int, int], ...]
    item_bytes: int
    accumulator_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor, dims: Any, accumulator_bytes: int) -> Reduction:
        """Return the reduction of `tensor` over `dims` (None and empty: all).

        The order is from TensorIterator.cpp, reorder_dimensions: kept dimensions as in the result, which is contiguous;
        reduced dimensions by the stride of the input.
        """
        rank = tensor.dim()
        requested_dims = (
            [] if dims is None or isinstance(dims, bool) else [dims] if isinstance(dims, int) else list(dims)
        )
        reduced_indices = {dim % rank for dim in requested_dims} if requested_dims and rank else set(range(rank))
        order = [dim for dim in reversed(range(rank)) if tensor.size(dim) != 1]
        reduced_dims = [(tensor.size(dim), tensor.stride(dim)) for dim in order if dim in reduced_indices]
        kept_dims = [(tensor.size(dim), tensor.stride(dim)) for dim in order if dim not in reduced_indices]
        merged = _merge_dims(_sort_by_stride(reduced_dims)), _merge_dims(kept_dims)
        return cls(*merged, tensor.element_size(), accumulator_bytes)

    def split(self) -> list[Reduction]:
        """Return parts that 32-bit indices can address, one per launch: the widest dimension is halved repeatedly."""
        dims = self.reduced_dims + self.kept_dims
        extents = [(size - 1) * stride * self.item_bytes for size, stride in dims]
        if not extents or (sum(extents) < _INT32_MAX and math.prod(size for size, _ in dims) <= _INT32_MAX):
            return [self]
        widest_index = extents.index(max(extents))
        size, stride = dims[widest_index]
        parts: list[Reduction] = []
        for part_size in (size // 2, size - size // 2):
            new_dims = (*dims[:widest_index], (part_size, stride), *dims[widest_index + 1 :])
            num_reduced = len(self.reduced_dims)
            parts += replace(self, reduced_dims=new_dims[:num_reduced], kept_dims=new_dims[num_reduced:]).split()
        return parts

    def compute_buffers(self, num_sms: int, threads_per_sm: int) -> list[int]:
        """Return the bytes of staging buffer and semaphores if the reduction is split over thread blocks, else [].

        From native/cuda/Reduce.cuh (setReduceConfig, global_memory_size, semaphore_size): a thread block has at most
        512 threads and is one warp wide where possible; the inputs of an output are split over blocks if each thread of
        a single block would have 256 or more inputs. So many inputs fill a block however many are loaded at once (the
        kernel's vt0), which is not part of the computation.
        """
        num_outputs = math.prod(size for size, _ in self.kept_dims)
        num_inputs = math.prod(size for size, _ in self.reduced_dims)
        if not num_outputs or not num_inputs:
            return []
        reduced, kept = self.reduced_dims, self.kept_dims
        along_inputs = not kept or (bool(reduced) and reduced[0][1] < kept[0][1])
        width, height = (num_inputs, num_outputs) if along_inputs else (num_outputs, num_inputs)
        outputs_per_thread = 1
        if not along_inputs and kept[0][1] == 1:
            outputs_per_thread = self._count_outputs_per_thread()
            width //= outputs_per_thread
        limit = _SPLIT_THREADS // outputs_per_thread
        max_width, max_height = min(floor_power_of_two(width), limit), min(floor_power_of_two(height), limit)
        rows = min(max_height, limit // min(max_width, 32))
        columns = min(max_width, limit // rows)
        step_input, step_output = (columns, 1) if along_inputs else (1, columns)
        values_per_thread = -(-num_inputs // (step_input * rows))
        num_output_blocks = -(-(num_outputs // outputs_per_thread) // step_output)
        max_blocks = num_sms * (threads_per_sm // (columns * rows))
        if values_per_thread < _MAX_VALUES_PER_THREAD or num_output_blocks > max_blocks:
            return []
        num_splits = min(-(-max_blocks // num_output_blocks), -(-values_per_thread // _MIN_VALUES_PER_THREAD))
        num_splits = max(num_splits, -(-values_per_thread // _MAX_VALUES_PER_THREAD))
        if num_splits <= 1:
            return []
        staging_bytes = self.accumulator_bytes * num_outputs * num_splits
        return [staging_bytes if along_inputs else staging_bytes * columns * outputs_per_thread, 4 * num_output_blocks]

    def _count_outputs_per_thread(self) -> int:
        """Return the number of adjacent outputs per thread: 4, 2 or 1, dividing all strides (get_output_vec_size)."""
        other_dims = (*self.reduced_dims, *self.kept_dims[1:])
        strides = [self.kept_dims[0][0], *(stride for _, stride in other_dims)]
        return next(width for width in (4, 2, 1) if all(stride % width == 0 for stride in strides))


def _sort_by_stride(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (size, stride) `pairs` as TensorIterator's insertion sort orders them; stride 0 (expanded) is skipped."""
    ordered = list(pairs)
    for i in range(1, len(ordered)):
        current = i
        for j in range(i - 1, -1, -1):
            before, after = ordered[j], ordered[current]
            if not before[1] or not after[1] or before == after:
                continue
            if (before[1], before[0]) < (after[1], after[0]):
                break
            ordered[j], ordered[current] = after, before
            current = j
    return ordered


def _merge_dims(pairs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return (size, stride) `pairs` with adjacent dimensions merged where one stride covers both."""
    merged: list[tuple[int, int]] = []
    for size, stride in pairs:
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return tuple(merged)


def floor_power_of_two(value: int) -> int:
    """Return the largest power of two up to `value`, or 1 if `value` is not positive."""
    return 1 << (value.bit_length() - 1) if value > 0 else 1


def accumulator_bytes_per_value(tensor: torch.Tensor) -> int:
    """Return the element size of `tensor`'s accumulation dtype: float32 for half precision, int64 for integers."""
    if tensor.is_floating_point() or tensor.is_complex():
        return max(4, tensor.element_size())
    return 8


def _make_formula(
    get_bytes: Callable[[torch.Tensor], int],
    dims_position: int = 1,
    *,
    casts_input: bool = False,
) -> Callable[[Any, DeviceProperties], list[int]]:
    """Return the scratch formula of an operator on gpu_reduce_kernel; argument `dims_position` has the dimensions."""

    def formula(args: Any, gpu: DeviceProperties) -> list[int]:
        data = args[0]
        dims = args[dims_position] if len(args) > dims_position else None
        copies: list[int] = []
        if casts_input and not data.is_floating_point() and not data.is_complex() and data.dtype is not torch.int64:
            # native/ReduceOpsUtils.h, make_reduction: inputs of another dtype than the result are converted first.
            copies = [8 * data.numel()]
            data = torch.empty_strided(data.size(), data.stride(), dtype=torch.int64, device="meta")
        # max() and min() without a dimension keep no index.
        num_bytes = data.element_size() if get_bytes is _get_pair_bytes and dims is None else get_bytes(data)
        return copies + reduction_buffers(data, dims, num_bytes, gpu)

    return formula


def reduction_buffers(tensor: torch.Tensor, dims: Any, accumulator_bytes: int, gpu: DeviceProperties) -> list[int]:
    """Return the bytes of a reduction's buffers. If half precision, or values with indices, need several launches, the
    first buffer has the accumulators between launches (Reduce.cuh, AccumulationBuffer).

    Each launch releases its buffers before the next (gpu_reduce_kernel calls itself for every part).
    """
    if tensor.numel() < 2:
        return []
    reduction = Reduction.of(tensor, dims, accumulator_bytes)
    parts = reduction.split()
    accumulators = []
    if len(parts) > 1 and (tensor.dtype in (torch.float16, torch.bfloat16) or accumulator_bytes == _PAIR_BYTES):
        accumulators = [accumulator_bytes * math.prod(size for size, _ in reduction.kept_dims)]
    return [*accumulators, *max((_compute_buffers(part, gpu.num_sms, gpu.threads_per_sm) for part in parts), key=sum)]


@functools.lru_cache(maxsize=4096)
def _compute_buffers(part: Reduction, num_sms: int, threads_per_sm: int) -> tuple[int, ...]:
    return tuple(part.compute_buffers(num_sms, threads_per_sm))


def _get_pair_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a value and an int64 index, aligned to 8 bytes, for every dtype."""
    return _PAIR_BYTES


# Operators on gpu_reduce_kernel (native/cuda/Reduce*Kernel.cu), by the accumulation dtype.
scratch(aten.sum)(_make_formula(accumulator_bytes_per_value, casts_input=True))
scratch(aten.prod)(_make_formula(accumulator_bytes_per_value, casts_input=True))
scratch(aten.nansum)(_make_formula(accumulator_bytes_per_value))
scratch(aten.mean)(_make_formula(accumulator_bytes_per_value))
scratch(aten.linalg_vector_norm)(_make_formula(accumulator_bytes_per_value, dims_position=2))
scratch(aten.amax, aten.amin, aten.any, aten.all)(_make_formula(torch.Tensor.element_size))
scratch(aten.max, aten.min)(_make_formula(_get_pair_bytes))
scratch(aten.argmax, aten.argmin)(_make_formula(lambda tensor: _PAIR_BYTES))  # with an index even without a dimension
# Mean, sum of squares, an int32 count and the count as a real number (native/SharedReduceOps.h, WelfordData).
scratch(aten.var, aten.std, aten.var_mean, aten.std_mean)(
    _make_formula(lambda tensor: 32 if tensor.dtype is torch.float64 else 16)
)
