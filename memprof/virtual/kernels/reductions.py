"""Reductions that are split over thread blocks, and the staging buffers that they take for it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from memprof.virtual.device_properties import DeviceProperties, torch_release
from memprof.virtual.kernels.registry import aten, scratch

_SPLIT_THREADS = 512
_MIN_VALUES_PER_THREAD = 16
_MAX_VALUES_PER_THREAD = 256
_INT32_MAX = 2**31 - 1
_PAIR_BYTES = 16  # a value and its int64 position, aligned to 8 bytes


@dataclass(frozen=True)
class Reduction:
    """A reduction as its kernel sees it: dimensions by rising stride, the reduced ones first, neighbours merged."""

    reduced: tuple[tuple[int, int], ...]  # (size, stride in elements) of the reduced dimensions
    kept: tuple[tuple[int, int], ...]
    item_bytes: int
    accumulator_bytes: int
    values_per_load: int = 4  # what a thread loads at once along a contiguous reduced dimension (the kernel's vt0)

    @classmethod
    def of(cls, tensor: torch.Tensor, dims: Any, accumulator_bytes: int, values_per_load: int = 4) -> Reduction:
        """Reducing `tensor` over `dims` (None and empty: all).

        The order is that of TensorIterator.cpp, reorder_dimensions: kept dimensions as in the result, which is
        contiguous; reduced ones by the stride of the input.
        """
        rank = tensor.dim()
        wanted = [] if dims is None or isinstance(dims, bool) else [dims] if isinstance(dims, int) else list(dims)
        chosen = {dim % rank for dim in wanted} if wanted and rank else set(range(rank))
        order = [dim for dim in reversed(range(rank)) if tensor.size(dim) != 1]
        reduced = [(tensor.size(dim), tensor.stride(dim)) for dim in order if dim in chosen]
        kept = [(tensor.size(dim), tensor.stride(dim)) for dim in order if dim not in chosen]
        merged = _merged(_by_stride(reduced)), _merged(kept)
        return cls(*merged, tensor.element_size(), accumulator_bytes, values_per_load)

    def split(self) -> list[Reduction]:
        """The parts that 32-bit indices can address, each of which is a launch of its own (halves of the widest)."""
        dims = self.reduced + self.kept
        extents = [(size - 1) * stride * self.item_bytes for size, stride in dims]
        if not extents or (sum(extents) < _INT32_MAX and math.prod(size for size, _ in dims) <= _INT32_MAX):
            return [self]
        widest = extents.index(max(extents))
        size, stride = dims[widest]
        parts: list[Reduction] = []
        for part in (size // 2, size - size // 2):
            halved = (*dims[:widest], (part, stride), *dims[widest + 1 :])
            count = len(self.reduced)
            parts += replace(self, reduced=halved[:count], kept=halved[count:]).split()
        return parts

    def buffers(self, num_sms: int, threads_per_sm: int) -> list[int]:
        """The staging buffer and the semaphores of a reduction that is split over thread blocks; else nothing.

        The launch rule of native/cuda/Reduce.cuh (setReduceConfig, global_memory_size, semaphore_size): a block is at
        most 512 threads, one warp wide where it can be; the inputs of one output go over blocks once every thread of a
        block would have 256 or more of them.
        """
        outputs = math.prod(size for size, _ in self.kept)
        inputs = math.prod(size for size, _ in self.reduced)
        if not outputs or not inputs:
            return []
        along_inputs = not self.kept or (bool(self.reduced) and self.reduced[0][1] < self.kept[0][1])
        width, height = (inputs, outputs) if along_inputs else (outputs, inputs)
        fastest = self.reduced[:1] if along_inputs else self.kept[:1]
        vector = 1
        if fastest and fastest[0][1] == 1:
            if along_inputs and width >= 128 and len(self.reduced) == 1:
                width //= self.values_per_load
            elif not along_inputs:
                vector = self._output_vector()
                width //= vector
        limit = _SPLIT_THREADS // vector
        widest, highest = min(power_of_two(width), limit), min(power_of_two(height), limit)
        rows = min(highest, limit // min(widest, 32))
        columns = min(widest, limit // rows)
        step_input, step_output = (columns, 1) if along_inputs else (1, columns)
        if -(-inputs // step_input) < min(rows * 16, _MAX_VALUES_PER_THREAD):
            return []
        values = -(-inputs // (step_input * rows))
        grid = -(-(outputs // vector) // step_output)
        target = num_sms * (threads_per_sm // (columns * rows))
        if values < _MAX_VALUES_PER_THREAD or grid > target:
            return []
        blocks = min(-(-target // grid), -(-values // _MIN_VALUES_PER_THREAD))
        blocks = max(blocks, -(-values // _MAX_VALUES_PER_THREAD))
        if blocks <= 1:
            return []
        staged = self.accumulator_bytes * outputs * blocks
        return [staged if along_inputs else staged * columns * vector, 4 * grid]

    def _output_vector(self) -> int:
        """Return how many adjacent outputs a thread makes (get_output_vec_size): 4, 2, 1; it divides all strides."""
        numbers = [self.kept[0][0], *(stride for _, stride in self.reduced), *(stride for _, stride in self.kept[1:])]
        return next(vector for vector in (4, 2, 1) if all(number % vector == 0 for number in numbers))


def _by_stride(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted by insertion, as TensorIterator does: an expanded dimension (stride 0) moves for none and is passed by."""
    ordered = list(pairs)
    for last in range(1, len(ordered)):
        moving = last
        for other in range(last - 1, -1, -1):
            before, after = ordered[other], ordered[moving]
            if not before[1] or not after[1] or before == after:
                continue
            if (before[1], before[0]) < (after[1], after[0]):
                break
            ordered[other], ordered[moving] = after, before
            moving = other
    return ordered


def _merged(pairs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Neighbouring dimensions that are one walk through memory, made one."""
    merged: list[tuple[int, int]] = []
    for size, stride in pairs:
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return tuple(merged)


def power_of_two(value: int) -> int:
    """Return the largest power of two up to `value`, which is 1 if that is none."""
    return 1 << (value.bit_length() - 1) if value > 0 else 1


def opmath(tensor: torch.Tensor) -> int:
    """Bytes of the type in which values of `tensor` are added up: float32 for half precision, int64 for integers."""
    if tensor.is_floating_point() or tensor.is_complex():
        return max(4, tensor.element_size())
    return 8


def _reduction(
    accumulator: Callable[[torch.Tensor], int],
    dims_at: int = 1,
    values_per_load: int = 4,
    *,
    half_per_load: int = 4,
    cast: bool = False,
) -> Callable[[Any, DeviceProperties], list[int]]:
    """The formula of an operator that calls gpu_reduce_kernel, whose dimensions are its argument number `dims_at`."""

    def formula(args: Any, gpu: DeviceProperties) -> list[int]:
        data = args[0]
        dims = args[dims_at] if len(args) > dims_at else None
        copied: list[int] = []
        if cast and not data.is_floating_point() and not data.is_complex() and data.dtype is not torch.int64:
            # native/ReduceOpsUtils.h, make_reduction: what is not of the result's type is converted first.
            copied = [8 * data.numel()]
            data = torch.empty_strided(data.size(), data.stride(), dtype=torch.int64, device="meta")
        per_load = half_per_load if values_per_load == 4 and data.element_size() == 2 else values_per_load
        num_bytes = data.element_size() if accumulator is _pair and dims is None else accumulator(data)
        return copied + reduction_buffers(data, dims, num_bytes, gpu, per_load)

    return formula


def reduction_buffers(
    tensor: torch.Tensor, dims: Any, accumulator_bytes: int, gpu: DeviceProperties, values_per_load: int = 4
) -> list[int]:
    """Return the buffers of a reduction; where one of half precision, or of values with positions, takes several
    launches, first what is carried between them, for which the result has no room (Reduce.cuh, AccumulationBuffer).

    Each launch gives its buffers back before the next (gpu_reduce_kernel calls itself for every part).
    """
    if tensor.numel() < 2:
        return []
    whole = Reduction.of(tensor, dims, accumulator_bytes, values_per_load)
    parts = whole.split()
    sums = []
    if len(parts) > 1 and (tensor.dtype in (torch.float16, torch.bfloat16) or accumulator_bytes == _PAIR_BYTES):
        sums = [accumulator_bytes * math.prod(size for size, _ in whole.kept)]
    return [*sums, *max((_buffers(part, gpu.num_sms, gpu.threads_per_sm) for part in parts), key=sum)]


@functools.lru_cache(maxsize=4096)
def _buffers(part: Reduction, num_sms: int, threads_per_sm: int) -> tuple[int, ...]:
    return tuple(part.buffers(num_sms, threads_per_sm))


def _pair(tensor: torch.Tensor) -> int:
    """A value and its int64 index, aligned to 8 bytes; max() and min() without a dimension keep no index."""
    return _PAIR_BYTES


# Sum and mean of half precision load eight values at once since torch 2.10 (pull request 165055).
_HALVES_PER_LOAD = 8 if torch_release() >= (2, 10) else 4

# By the type in which the operators on gpu_reduce_kernel (native/cuda/Reduce*Kernel.cu) accumulate.
scratch(aten.sum)(_reduction(opmath, half_per_load=_HALVES_PER_LOAD, cast=True))
scratch(aten.prod)(_reduction(opmath, cast=True))
scratch(aten.nansum)(_reduction(opmath))
scratch(aten.mean)(_reduction(opmath, half_per_load=_HALVES_PER_LOAD))
scratch(aten.linalg_vector_norm)(_reduction(opmath, dims_at=2))
scratch(aten.amax, aten.amin, aten.any, aten.all)(_reduction(torch.Tensor.element_size))
scratch(aten.max, aten.min)(_reduction(_pair))
scratch(aten.argmax, aten.argmin)(_reduction(lambda tensor: _PAIR_BYTES))  # an index without a dimension as well
# Mean, sum of squares, an int32 count and the count as a real number (native/SharedReduceOps.h, WelfordData).
scratch(aten.var, aten.std, aten.var_mean, aten.std_mean)(
    _reduction(lambda tensor: 32 if tensor.dtype is torch.float64 else 16, values_per_load=2)
)
