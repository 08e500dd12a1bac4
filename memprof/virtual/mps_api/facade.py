"""Replacements of `torch.mps` and `torch.backends.mps`, the interface of Apple's GPUs.

Sources: torch/mps/__init__.py, torch/backends/mps/__init__.py and aten/src/ATen/mps/MPSAllocator.h of v2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memprof.patching import Extension, Patch
from memprof.virtual.generators import make_rng_state
from memprof.virtual.gpu_functions import GpuFunctions, make_constant_function, make_distinct, make_rejection
from memprof.virtual.install_context import InstallContext

_DEFAULT_LOW_RATIO = 1.4  # PYTORCH_MPS_LOW_WATERMARK_RATIO, if it is not set


class TorchMps(Extension):
    """Patches of `torch.mps` and `torch.backends.mps`."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches by which the functions describe the virtual GPU."""
        functions = GpuFunctions(context)
        backend: dict[str, Any] = {
            **dict.fromkeys(("is_available", "is_built"), True),
            **dict.fromkeys(("is_macos13_or_newer", "is_macos_or_newer"), True),
            "get_name": context.gpu.name.partition(" (")[0],
            "get_core_count": context.gpu.num_sms,
        }
        for name, value in backend.items():
            if hasattr(torch.backends.mps, name):  # releases differ
                yield torch.backends.mps, name, make_constant_function(value)
        for name, function in _map_functions(functions, context).items():
            if hasattr(torch.mps, name):
                yield torch.mps, name, make_distinct(function)


def _map_functions(functions: GpuFunctions, context: InstallContext) -> dict[str, Callable[..., Any]]:
    """Return the replacement of each function of `torch.mps` by name."""
    return {
        **{name: make_constant_function(None) for name in ("manual_seed", "seed", "set_rng_state")},
        "is_available": make_constant_function(True),
        "device_count": make_constant_function(1),
        "get_rng_state": make_constant_function(make_rng_state()),
        "synchronize": functions.synchronize,
        "empty_cache": functions.empty_cache,
        "current_allocated_memory": functions.make_statistic_function("allocated_bytes.all.current"),
        "driver_allocated_memory": functions.make_statistic_function("reserved_bytes.all.current"),
        "recommended_max_memory": make_constant_function(context.gpu.total_bytes),
        "set_per_process_memory_fraction": functools.partial(_set_memory_fraction, context),
        "compile_shader": make_rejection("compiles a Metal shader", "use operators of torch"),
        "load_metallib": make_rejection("loads a Metal library", "use operators of torch"),
    }


def _set_memory_fraction(context: InstallContext, fraction: float) -> None:
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 2:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~2")
    # The low ratio stays, if it is not above the limit; torch would refuse it.
    low_ratio = f",mps_low_watermark_ratio:{fraction}" if 0 < fraction < _DEFAULT_LOW_RATIO else ""
    context.settings.set(f"mps_high_watermark_ratio:{fraction}{low_ratio}")
