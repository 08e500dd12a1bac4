"""Replacements of `torch.cuda`: number of GPUs, current device, properties, memory statistics."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.backends.cudnn.rnn

from memprof.patching import Extension, Patch
from memprof.torch_private import cuda, kernels
from memprof.virtual.cuda_api.driver import UUID, DeviceProperties, get_multiprocessor_limits, patch_driver
from memprof.virtual.device_properties import max_threads_per_sm
from memprof.virtual.gpu_functions import GPU_METHODS, STATISTICS, GpuFunctions, make_constant_function, make_distinct
from memprof.virtual.install_context import InstallContext
from memprof.virtual.kernels.recurrent import MODES, is_acceptable

# Functions of `torch.cuda` that come from torch.cuda.random.
_RANDOM_NAMES = (
    "get_rng_state", "get_rng_state_all", "initial_seed", "manual_seed", "manual_seed_all", "seed", "seed_all",
    "set_rng_state", "set_rng_state_all",
)  # fmt: skip
_HIP_VERSION = "7.2.53211"  # of a wheel of July 2026 (github.com/pytorch/pytorch, issue 192259)
# Functions of `torch.cuda` with a constant result for any arguments: None, 0 or True.
_CONSTANT_RESULTS: dict[str, Any] = {
    **dict.fromkeys(
        ("init", "_lazy_init", "ipc_collect", "manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state",
         "set_rng_state_all"),
    ),
    **dict.fromkeys(
        ("initial_seed", "utilization", "memory_usage", "temperature", "power_draw", "clock_rate"), 0
    ),
    **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
    "is_current_stream_capturing": False,
    "list_gpu_processes": "no processes are running",
}  # fmt: skip


class TorchCuda(Extension):
    """Patches of `torch.cuda`, and of functions by which torch describes its build for CUDA."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches by which the functions describe the virtual GPU."""
        functions = GpuFunctions(context)
        replacements = _map_cuda_functions(functions, context)
        for name, value in replacements.items():
            yield torch.cuda, name, make_distinct(value)
            for module in (torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs):
                # torch.cuda.memory_summary, and modules that import the functions from here
                if vars(module).get(name) is not None and not (module is torch.cuda.random and name in _RANDOM_NAMES):
                    yield module, name, make_distinct(value)
            if name in _RANDOM_NAMES:
                yield torch.cuda.random, name, make_distinct(value)
        yield torch.cuda, "device_of", replacements["device"]
        yield from patch_driver(context.gpus)
        yield from _patch_allocator_functions(functions, context)
        yield from _patch_build_properties(context)


def _map_cuda_functions(functions: GpuFunctions, context: InstallContext) -> dict[str, Any]:
    gpu, gpus = context.gpu, context.gpus
    major, minor = gpu.compute_capability
    arch = gpu.gcn_arch.partition(":")[0] or f"sm_{major}{minor}"
    properties = DeviceProperties(
        name=gpu.name,
        major=major,
        minor=minor,
        total_memory=gpu.total_bytes,
        multi_processor_count=gpu.num_sms,
        warp_size=64 if gpu.gcn_arch.startswith("gfx9") else 32,  # wavefronts of CDNA, of RDNA and warps
        is_integrated=int(gpu.unified_bytes is not None),
        is_multi_gpu_board=0,
        max_threads_per_multi_processor=max_threads_per_sm(gpu.compute_capability, gpu.gcn_arch),
        L2_cache_size=gpu.l2_bytes or 0,
        gcnArchName=gpu.gcn_arch or arch,
        uuid=UUID,
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
        **get_multiprocessor_limits(gpu.compute_capability),
    )

    class CudaDevice:
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
        "device": CudaDevice,
        "device_count": make_constant_function(gpus.num_gpus),
        "get_arch_list": make_constant_function([arch]),
        "get_device_name": functions.make_device_query(gpu.name),
        "get_device_capability": functions.make_device_query((major, minor)),
        "get_device_properties": functions.make_device_query(properties),
    }


def _patch_allocator_functions(functions: GpuFunctions, context: InstallContext) -> Iterator[Patch]:
    """Yield patches of the allocator's snapshot and settings, and of the release of cuBLAS workspaces."""
    yield cuda.record_memory_history.patch(functions.history.record)
    # Read by memory_snapshot, _snapshot and _dump_snapshot.
    yield cuda.memory_snapshot.patch(functions.snapshot)
    yield cuda.clear_cublas_workspaces.patch(context.dispatch_mode.clear_workspaces)
    yield cuda.set_allocator_settings.patch(make_distinct(context.settings.set))


def _patch_build_properties(context: InstallContext) -> Iterator[Patch]:
    """Yield patches that make torch report a build with CUDA or ROCm, cuDNN and NVTX."""
    nvtx = SimpleNamespace(
        rangePushA=make_constant_function(0),
        rangePop=make_constant_function(0),
        rangeStartA=make_constant_function(0),
        rangeEnd=make_constant_function(None),
        markA=make_constant_function(None),
    )
    yield cuda.nvtx.patch(nvtx)
    if context.gpu.backend == "hip":
        yield torch.version, "hip", _HIP_VERSION
        yield torch.version, "cuda", None
        yield torch.backends.cuda, "is_built", make_constant_function(True)  # torch's build with ROCm says so too
    elif torch.version.cuda is None:  # a CPU build; programs derive bfloat16 support from the version
        yield torch.version, "cuda", context.libraries.cuda
        yield torch.backends.cuda, "is_built", make_constant_function(True)
    yield torch.backends.cudnn, "is_available", make_constant_function(True)
    yield torch.backends.cudnn, "version", make_constant_function(context.libraries.cudnn)
    yield torch.backends.cudnn, "is_acceptable", is_acceptable
    yield torch.backends.cudnn.rnn, "get_cudnn_mode", lambda mode: MODES[mode.lower()]
    yield kernels.use_cudnn_rnn_flatten_weight.patch(make_constant_function(True))
