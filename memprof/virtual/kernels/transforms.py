"""Fourier transforms: torch's tensors between their steps (native/cuda/SpectralOps.cpp), and cuFFT's workspace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.registry import aten, kernel

_MOST_DIMS = 3  # of one plan
RULE = (
    "cuFFT's workspaces, gone when each call returns, follow what was measured on an H100: none for lengths up to 4096, "
    "from there on a copy of the (half) spectrum, and for a prime factor above 127 the padded signals. Which plan cuFFT "
    "takes is not published; on other GPUs they are not counted."
)


@kernel(aten._fft_c2c)
def complex_to_complex(launch: KernelContext) -> Any:
    """Up to three dimensions at a time, with a tensor between."""
    data, dims = launch.args[:2]
    item_bytes = data.element_size()
    with launch.scratch(data.nbytes * (len(dims) > _MOST_DIMS)):
        result = launch.run()
        _take(launch, data, dims[-_MOST_DIMS:], item_bytes)
        if len(dims) > _MOST_DIMS:
            _take(launch, data, dims[:-_MOST_DIMS], item_bytes, is_first=False)
    return result


@kernel(aten._fft_r2c)
def real_to_complex(launch: KernelContext) -> Any:
    """All dimensions at once, or the last one and then the others, in a second tensor."""
    data, dims = launch.args[:2]
    item_bytes = 2 * data.element_size()
    if _in_one_plan(dims):
        result = launch.run()
        _take(launch, data, dims, item_bytes, is_real=True)
        return result
    sizes = list(data.shape)
    if launch.args[3]:
        sizes[dims[-1]] = sizes[dims[-1]] // 2 + 1
    with launch.scratch(math.prod(sizes) * item_bytes):
        _take(launch, data, dims[-1:], item_bytes, is_real=True)
        result = launch.run()
        _take(launch, result, dims[:-1], item_bytes, is_first=False)
    return result


@kernel(aten._fft_c2r)
def complex_to_real(launch: KernelContext) -> Any:
    """A copy, as cuFFT overwrites what it reads; or all dimensions but the last, and then that one."""
    data, dims = launch.args[:2]
    item_bytes = data.element_size()
    result = launch.run()
    with launch.scratch(data.nbytes):
        if not _in_one_plan(dims):
            _take(launch, data, dims[:-1], item_bytes)
            dims = dims[-1:]
        _take(launch, result, dims, item_bytes, is_real=True, is_first=False)
    return result


def _in_one_plan(dims: Sequence[int]) -> bool:
    """Return what use_optimized_cufft_path does."""
    return len(dims) <= _MOST_DIMS and tuple(dims[:2]) != (0, 1)


def _take(
    launch: KernelContext,
    data: torch.Tensor,
    dims: Sequence[int],
    item_bytes: int,
    *,
    is_real: bool = False,
    is_first: bool = True,
) -> None:
    """Take what one plan does: a copy of inputs whose other dimensions are not one in memory, and the workspace."""
    batch = sorted(
        ((stride, size) for dim, (stride, size) in enumerate(zip(data.stride(), data.shape)) if dim not in dims),
        reverse=True,
    )
    batch = [(stride, size) for stride, size in batch if size > 1]
    is_one = all(outer == stride * size for (outer, _), (stride, size) in zip(batch, batch[1:]))
    lengths = [data.shape[dim] for dim in dims]
    num_bytes = workspace_bytes(launch.gpu, math.prod(size for _, size in batch), lengths, item_bytes, is_real=is_real)
    if num_bytes:
        launch.values.assume(RULE)
    launch.transients(data.nbytes * (is_first and not is_one), num_bytes)


# -- cuFFT -------------------------------------------------------------------------------------------------------------

_IN_ONE_KERNEL = 4096  # the longest without a workspace; the shortest with one was 44,100
_LARGEST_RADIX = 127
_PLAN_BYTES = 2048  # beside the signals of real transforms by Bluestein's algorithm


def workspace_bytes(
    gpu: DeviceProperties, batch: int, lengths: Sequence[int], item_bytes: int, *, is_real: bool
) -> int:
    """Return what cuFFT takes for `batch` transforms of these lengths, on compute capability 9.0.

    Fits of all transforms of powers of two, of 44,100 and of 480,000 that an H100 recorded with CUDA 13.0, and of the
    primes 4099 and 999,983, which are padded to a product of 2, 3 and 5.
    """
    longest = max(lengths, default=0)
    if gpu.compute_capability != (9, 0) or longest <= _IN_ONE_KERNEL:
        return 0
    others = batch * math.prod(lengths) // longest
    if _without_factors(longest, _LARGEST_RADIX) > 1:
        padded = 2 * longest - 1
        while _without_factors(padded, 5) > 1:
            padded += 1
        signals = others * padded * item_bytes
        return signals + others * longest * item_bytes // 2 + _PLAN_BYTES if is_real else 2 * signals
    return others * (longest // 2 + 1 if is_real else longest) * item_bytes


def _without_factors(length: int, most: int) -> int:
    for factor in range(2, most + 1):
        while length % factor == 0:
            length //= factor
    return length
