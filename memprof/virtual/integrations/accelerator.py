"""Patches of what torch has for any type of GPU: `torch.accelerator`, `torch.Generator`, streams and events.

What it has for one type alone is in `cuda_api/`, `mps_api/` and `xpu_api/`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from memprof.patching import Extension, Patch
from memprof.torch_private import cuda
from memprof.trace.events import GPU_TYPES
from memprof.virtual import streams
from memprof.virtual.generators import make_generator_class
from memprof.virtual.gpu_functions import (
    GPU_METHODS,
    STATISTICS,
    GpuFunctions,
    make_constant_function,
    make_distinct,
    make_rejection,
)
from memprof.virtual.gpus import Gpus
from memprof.virtual.install_context import InstallContext

# Name in `torch.accelerator`, if torch.cuda has another -> name in torch.cuda; torch releases have different functions.
_OTHER_NAMES = {
    "current_device_index": "current_device",
    "current_device_idx": "current_device",
    "set_device_index": "set_device",
    "set_device_idx": "set_device",
    "get_memory_info": "mem_get_info",
}


class Accelerator(Extension):
    """Patches by which functions for any type of GPU describe the virtual GPU."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield the patches, first those that hide other types of GPUs, which the machine has not."""
        gpus, functions = context.gpus, GpuFunctions(context)
        yield from _hide_types(set(GPU_TYPES) - {gpus.type})
        for name, value in _map_functions(functions).items():
            for owner in (torch.accelerator, getattr(torch.accelerator, "memory", None)):
                if hasattr(owner, name):
                    yield owner, name, make_distinct(value)
        yield from patch_accelerator(gpus)
        yield torch, "Generator", make_generator_class(gpus)
        yield torch.Tensor, "record_stream", make_distinct(functions.record_stream)
        yield from streams.patches(context.recorder.streams, functions)
        for function, answer in (
            (cuda.accelerator_set_allocator_settings, context.settings.set),
            (cuda.accelerator_get_allocator_settings, context.settings.get),
        ):
            if function.exists():  # releases differ
                yield function.patch(answer)


def _map_functions(functions: GpuFunctions) -> dict[str, Any]:
    """Return the replacement of each function of `torch.accelerator` by name."""
    shared: dict[str, Any] = {
        **{name: functions.make_statistic_function(key) for name, key in STATISTICS.items()},
        **{name: getattr(functions, name) for name in GPU_METHODS},
    }
    return {
        **shared,
        **{name: shared[cuda_name] for name, cuda_name in _OTHER_NAMES.items()},
        "is_available": make_constant_function(True),
        "device_count": make_constant_function(functions.gpus.num_gpus),
        "empty_host_cache": make_constant_function(None),
        "current_accelerator": make_constant_function(torch.device(functions.gpus.type)),
        "get_device_capability": make_rejection(
            "asks torch.accelerator for its capability", f"ask torch.{functions.gpus.type} for the GPU's"
        ),
        "Graph": make_rejection("makes a torch.accelerator.Graph", "make a torch.cuda.CUDAGraph"),
    }


def patch_accelerator(gpus: Gpus) -> Iterator[Patch]:
    """Yield patches of the functions below `torch.accelerator`."""
    results = {
        cuda.accelerator_synchronize_device: None,
        cuda.accelerator_empty_host_cache: None,
        cuda.accelerator_get_accelerator: torch.device(gpus.type),
        cuda.get_accelerator: torch.device(gpus.type),
    }
    yield from (function.patch(make_constant_function(value)) for function, value in results.items())
    yield cuda.accelerator_get_device_index.patch(lambda: gpus.current)
    for function in (
        cuda.accelerator_set_device_index, cuda.accelerator_exchange_device, cuda.accelerator_maybe_exchange_device,
    ):  # fmt: skip
        yield function.patch(lambda device: gpus.select(device))


def _hide_types(types: set[str]) -> Iterator[Patch]:
    """Yield patches by which torch finds no GPU of `types`, even where this machine has one."""
    for device_type in sorted(types):
        module: Any = getattr(torch, device_type)
        for name, value in (("is_available", False), ("device_count", 0)):
            if hasattr(module, name):  # releases differ
                yield module, name, make_constant_function(value)
        if device_type == "mps":
            yield torch.backends.mps, "is_available", make_constant_function(False)
        else:
            yield module, "_lazy_init", functools.partial(_raise_not_compiled, device_type.upper())


def _raise_not_compiled(name: str) -> None:
    raise AssertionError(f"Torch not compiled with {name} enabled")
