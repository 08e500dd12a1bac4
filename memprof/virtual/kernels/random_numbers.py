"""Kernels of operators that draw random numbers, where torch's meta kernels take no generator or are missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memprof.virtual.kernels.registry import aten, kernel

if TYPE_CHECKING:
    from memprof.virtual.kernel_context import KernelContext


@kernel(aten.cauchy_, aten.exponential_, aten.geometric_, aten.log_normal_)
def draw_in_place(launch: KernelContext) -> Any:
    """Check the arguments by the meta kernel, without generator; CUDA's allocate nothing (native/Distributions.cpp)."""
    return launch.func(*launch.args)


@kernel(aten.binomial)
def binomial(launch: KernelContext) -> Any:
    """Allocate the result, of the shape of the counts (native/Distributions.cpp)."""
    counts = launch.args[0]
    return launch.new(counts.shape, counts.dtype)
