"""Replacements of `torch.xpu`, the interface of Intel GPUs: number of GPUs, properties, memory statistics."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from memprof.patching import Extension, Patch
from memprof.virtual.generators import make_gpu_generator
from memprof.virtual.gpu_functions import (
    GPU_METHODS,
    STATISTICS,
    GpuFunctions,
    make_constant_function,
    make_distinct,
)
from memprof.virtual.install_context import InstallContext

# Functions with a constant result for any arguments.
_CONSTANT_RESULTS: dict[str, Any] = {
    **dict.fromkeys(("init", "_lazy_init", "manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state")),
    **dict.fromkeys(("set_rng_state_all",)),
    **dict.fromkeys(("initial_seed", "utilization", "memory_usage", "temperature", "power_draw", "clock_rate"), 0),
    **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported", "is_tf32_supported"), True),
    "is_current_stream_capturing": False,
}


class TorchXpu(Extension):
    """Patches of `torch.xpu` and its modules."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches by which the functions describe the virtual GPU."""
        for name, value in _map_functions(GpuFunctions(context), context).items():
            for module in (torch.xpu, torch.xpu.memory, torch.xpu.random):
                if hasattr(module, name):  # releases differ
                    yield module, name, make_distinct(value)
        yield torch.xpu, "default_generators", tuple(map(make_gpu_generator, context.gpus.devices))


def _map_functions(functions: GpuFunctions, context: InstallContext) -> dict[str, Any]:
    gpu, gpus = context.gpu, context.gpus
    properties = SimpleNamespace(
        name=gpu.name,
        type="gpu",
        total_memory=gpu.total_bytes,
        max_compute_units=gpu.num_sms,
        gpu_eu_count=gpu.num_sms,
        has_fp16=1,
        has_fp64=1,
    )

    class XpuDevice:
        def __init__(self, device: Any = None) -> None:
            self.idx = gpus.index(device)
            self.prev_idx = -1

        def __enter__(self) -> None:
            self.prev_idx = gpus.select(self.idx)

        def __exit__(self, *exc: object) -> None:
            gpus.select(self.prev_idx)

    return {
        **{name: make_constant_function(value) for name, value in _CONSTANT_RESULTS.items()},
        **{name: functions.make_statistic_function(key) for name, key in STATISTICS.items()},
        **{name: getattr(functions, name) for name in GPU_METHODS},
        "device": XpuDevice,
        "device_count": make_constant_function(gpus.num_gpus),
        "get_device_name": functions.make_device_query(gpu.name),
        "get_device_properties": functions.make_device_query(properties),
        # The capabilities of an Intel GPU are its properties.
        "get_device_capability": functions.make_device_query(vars(properties)),
    }
