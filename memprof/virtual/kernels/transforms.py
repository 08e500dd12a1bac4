"""Fourier transforms: the temporaries of torch's operators (native/cuda/SpectralOps.cpp), and cuFFT's workspace."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from memprof.units import round_up
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.registry import aten, kernel

_MAX_PLAN_DIMS = 3  # dimensions of one plan
WORKSPACE_ASSUMPTION = (
    "cuFFT's workspaces, gone when each call returns, follow what was measured on an H100: a copy of the spectrum "
    "where a transform takes several kernels, and of padded signals where a prime factor is large. Which plan cuFFT "
    "takes is not published; on other GPUs they are not counted."
)


@kernel(aten._fft_c2c)
def complex_to_complex(launch: KernelContext) -> Any:
    """Transform up to three dimensions per cuFFT plan, with a temporary tensor between plans."""
    data, dims = launch.args[:2]
    item_bytes = data.element_size()
    with launch.scratch(data.nbytes * (len(dims) > _MAX_PLAN_DIMS)):
        result = launch.run()
        _allocate_plan_buffers(launch, data, dims[-_MAX_PLAN_DIMS:], item_bytes)
        if len(dims) > _MAX_PLAN_DIMS:
            _allocate_plan_buffers(launch, data, dims[:-_MAX_PLAN_DIMS], item_bytes, is_first=False)
    return result


@kernel(aten._fft_r2c)
def real_to_complex(launch: KernelContext) -> Any:
    """Transform all dimensions with one plan, or the last dimension into a temporary tensor and then the others."""
    data, dims = launch.args[:2]
    item_bytes = 2 * data.element_size()
    if _is_one_plan(dims):
        result = launch.run()
        _allocate_plan_buffers(launch, data, dims, item_bytes, is_real=True)
        return result
    sizes = list(data.shape)
    if launch.args[3]:
        sizes[dims[-1]] = sizes[dims[-1]] // 2 + 1
    with launch.scratch(math.prod(sizes) * item_bytes):
        _allocate_plan_buffers(launch, data, dims[-1:], item_bytes, is_real=True)
        result = launch.run()
        _allocate_plan_buffers(launch, result, dims[:-1], item_bytes, is_first=False)
    return result


@kernel(aten._fft_c2r)
def complex_to_real(launch: KernelContext) -> Any:
    """Transform a copy, since cuFFT overwrites its input: all dimensions with one plan, or the last one separately."""
    data, dims = launch.args[:2]
    item_bytes = data.element_size()
    result = launch.run()
    with launch.scratch(data.nbytes):
        in_columns = math.prod(data.shape[dims[-1] + 1 :]) > 1
        if not _is_one_plan(dims) and len(dims) > 1:
            _allocate_plan_buffers(launch, data, dims[:-1], item_bytes)
            dims, in_columns = dims[-1:], True
        _allocate_plan_buffers(launch, result, dims, item_bytes, is_real=True, is_first=False, in_columns=in_columns)
    return result


def _is_one_plan(dims: Sequence[int]) -> bool:
    """Return whether one cuFFT plan transforms all `dims` (use_optimized_cufft_path)."""
    return len(dims) <= _MAX_PLAN_DIMS and tuple(dims[:2]) != (0, 1)


def _allocate_plan_buffers(
    launch: KernelContext,
    data: torch.Tensor,
    dims: Sequence[int],
    item_bytes: int,
    *,
    is_real: bool = False,
    is_first: bool = True,
    in_columns: bool = False,
) -> None:
    """Allocate a plan's temporaries: the workspace, and a copy of an input whose batch dimensions cannot be merged."""
    batch_dims = [dim for dim, size in enumerate(data.shape) if dim not in dims and size > 1]
    batch = sorted(((data.stride(dim), data.shape[dim]) for dim in batch_dims), reverse=True)
    is_dense_batch = all(outer == stride * size for (outer, _), (stride, size) in itertools.pairwise(batch))
    lengths, num_signals = [data.shape[dim] for dim in dims], math.prod(size for _, size in batch)
    in_columns = in_columns or (bool(dims) and data.stride(dims[-1]) > 1)
    num_bytes = workspace_bytes(launch.gpu, num_signals, lengths, item_bytes, is_real=is_real, in_columns=in_columns)
    if num_bytes:
        launch.values.assume(WORKSPACE_ASSUMPTION)
    launch.transients(data.nbytes * (is_first and not is_dense_batch), num_bytes)


# -- cuFFT -------------------------------------------------------------------------------------------------------------

_LARGEST_RADIX = 127
_LARGEST_SHORT_RADIX = 13  # largest prime factor of real transforms in one kernel
_LONGEST_PRIME = 4096
# The longest transforms that one kernel holds: along contiguous memory, and along columns.
_LONGEST_COMPLEX = {False: 24_576, True: 4096}
_LONGEST_REAL_POWER = {False: 16_384, True: 2048}
_LONGEST_REAL = 480
_ALIGNMENT_BYTES = 1024


def workspace_bytes(
    gpu: DeviceProperties, num_signals: int, lengths: Sequence[int], item_bytes: int, *, is_real: bool, in_columns: bool
) -> int:
    """Return the bytes of cuFFT's workspace for `num_signals` transforms of `lengths`, on compute capability 9.0; else
    0.

    The formula reproduces 827 of 919 calls recorded on an H100 with CUDA 13.0, over 186 lengths. Most of the others are
    longer than the usual limit of one kernel but run in one: for which lengths is not published.
    """
    if gpu.compute_capability != (9, 0) or not lengths:
        return 0
    *outer, last = lengths
    num_values = num_signals * math.prod(outer) * (last // 2 + 1 if is_real else last)
    if is_real:
        num_bytes = _compute_real_workspace(num_signals, math.prod(outer), last, item_bytes, in_columns)
    else:
        num_bytes = _compute_complex_workspace(num_values // last, last, item_bytes, in_columns)
    return max([num_bytes, *(_compute_complex_workspace(num_values // n, n, item_bytes, True) for n in outer)])


def _compute_real_workspace(num_signals: int, rows: int, length: int, item_bytes: int, in_columns: bool) -> int:
    if length & (length - 1) == 0:
        max_length = _LONGEST_REAL_POWER[in_columns] if item_bytes <= 8 else 4096
    elif length % 2:
        max_length = _LARGEST_RADIX
    else:
        max_length = _LONGEST_REAL * (_divide_out_factors(length, _LARGEST_SHORT_RADIX) == 1)
    if length <= max_length:
        return 0
    if length % 2 == 0:  # run as one complex signal of half the length
        half = length // 2
        return num_signals * rows * (half + (_compute_complex_workspace(1, half, item_bytes, False) > 0)) * item_bytes
    pairs = -(-num_signals // 2) * rows  # two real signals run as one complex signal
    copied_bytes = pairs * length * item_bytes
    return copied_bytes + (2 * _padded_bytes(pairs, length, item_bytes, 1) or round_up(copied_bytes, _ALIGNMENT_BYTES))


def _compute_complex_workspace(num_signals: int, length: int, item_bytes: int, in_columns: bool) -> int:
    is_split = length > _LONGEST_COMPLEX[in_columns]
    return 2 * _padded_bytes(num_signals, length, item_bytes) or num_signals * length * item_bytes * is_split


def _padded_bytes(num_signals: int, length: int, item_bytes: int, extra_bytes: int = 0) -> int:
    """Return the bytes of signals padded to lengths with prime factors up to 5 (Bluestein); 0 if not padded."""
    if length <= _LONGEST_PRIME or _divide_out_factors(length, _LARGEST_RADIX) == 1:
        return 0
    padded_length = 2 * length - 1
    while _divide_out_factors(padded_length, 5) > 1:
        padded_length += 1
    return round_up(num_signals * padded_length * item_bytes + extra_bytes, _ALIGNMENT_BYTES)


def _divide_out_factors(length: int, max_factor: int) -> int:
    for factor in range(2, max_factor + 1):
        while length % factor == 0:
            length //= factor
    return length
