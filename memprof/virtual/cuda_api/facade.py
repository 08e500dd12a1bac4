"""Replacements of `torch.cuda`: number of GPUs, current device, properties, memory statistics, and streams."""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.backends.cudnn.rnn

from memprof.patching import Extension, Patch
from memprof.torch_private import cuda, kernels
from memprof.trace.events import NONE, Trace
from memprof.virtual.allocator_answers import MemoryStatistics
from memprof.virtual.cuda_api import streams
from memprof.virtual.cuda_api.driver import (
    UUID,
    DeviceProperties,
    get_multiprocessor_limits,
    make_constant_function,
    make_rng_state,
    patch_driver,
)
from memprof.virtual.device_properties import max_threads_per_sm
from memprof.virtual.install_context import InstallContext
from memprof.virtual.kernels.recurrent import MODES, is_acceptable
from memprof.virtual.limits import unsupported_error
from memprof.watch.wrappers import get_sparse_parts

# Functions of `torch.cuda` that come from torch.cuda.random.
_RANDOM_NAMES = (
    "get_rng_state", "get_rng_state_all", "initial_seed", "manual_seed", "manual_seed_all", "seed", "seed_all",
    "set_rng_state", "set_rng_state_all",
)  # fmt: skip
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
# Functions that return one of the caching allocator's statistics.
_STATISTICS = {
    "memory_allocated": "allocated_bytes.all.current",
    "max_memory_allocated": "allocated_bytes.all.peak",
    "memory_reserved": "reserved_bytes.all.current",
    "max_memory_reserved": "reserved_bytes.all.peak",
}
# Functions that are methods of `_CudaFunctions`.
_CUDA_METHODS = (
    "current_device", "set_device", "synchronize", "empty_cache", "mem_get_info", "memory_stats",
    "memory_stats_as_nested_dict", "reset_peak_memory_stats", "reset_accumulated_memory_stats", "device_memory_used",
    "set_per_process_memory_fraction", "get_per_process_memory_fraction", "set_stream", "current_stream",
    "default_stream", "get_rng_state", "get_rng_state_all",
)  # fmt: skip
# Function of `torch.accelerator` -> the equivalent of `torch.cuda`; torch releases have different functions.
_CUDA_EQUIVALENTS = {
    "current_device_index": "current_device",
    "current_device_idx": "current_device",
    "set_device_index": "set_device",
    "set_device_idx": "set_device",
    "get_memory_info": "mem_get_info",
    "empty_host_cache": "ipc_collect",
    **{
        name: name
        for name in (
            "is_available", "device_count", "current_stream", "set_stream", "synchronize", "empty_cache",
            "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats",
            "memory_stats_as_nested_dict", "reset_accumulated_memory_stats", "reset_peak_memory_stats",
        )
    },
}  # fmt: skip
_FRACTION = "per_process_memory_fraction"


class TorchCuda(Extension):
    """Patches of `torch.cuda`, `torch.accelerator` and other functions of torch that describe the GPU."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches by which the functions describe the virtual GPU."""
        functions = _CudaFunctions(context)
        replacements = _map_cuda_functions(functions, context)
        for name, value in replacements.items():
            yield torch.cuda, name, _make_distinct(value)
            for module in (torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs):
                # torch.cuda.memory_summary, and modules that import the functions from here
                if vars(module).get(name) is not None and not (module is torch.cuda.random and name in _RANDOM_NAMES):
                    yield module, name, _make_distinct(value)
            if name in _RANDOM_NAMES:
                yield torch.cuda.random, name, _make_distinct(value)
        yield torch.cuda, "device_of", replacements["device"]
        yield torch.Tensor, "record_stream", _make_distinct(functions.record_stream)
        yield from patch_driver(context.gpus)
        for name, value in _map_accelerator_functions(replacements).items():
            if hasattr(torch.accelerator, name):
                yield torch.accelerator, name, _make_distinct(value)
            if hasattr(getattr(torch.accelerator, "memory", None), name):
                yield torch.accelerator.memory, name, _make_distinct(value)
        yield from _patch_allocator_functions(functions, context)
        yield from streams.patches(context.recorder.streams)
        yield from _patch_build_properties(context)


def _map_cuda_functions(functions: _CudaFunctions, context: InstallContext) -> dict[str, Any]:
    gpu, gpus = context.gpu, context.gpus
    major, minor = gpu.compute_capability
    properties = DeviceProperties(
        name=gpu.name,
        major=major,
        minor=minor,
        total_memory=gpu.total_bytes,
        multi_processor_count=gpu.num_sms,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
        max_threads_per_multi_processor=max_threads_per_sm(gpu.compute_capability),
        L2_cache_size=gpu.l2_bytes or 0,
        gcnArchName=f"sm_{major}{minor}",
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
        **{name: functions.make_statistic_function(key) for name, key in _STATISTICS.items()},
        **{name: getattr(functions, name) for name in _CUDA_METHODS},
        "device": CudaDevice,
        "device_count": make_constant_function(gpus.num_gpus),
        "get_arch_list": make_constant_function([f"sm_{major}{minor}"]),
        "get_device_name": functions.make_device_query(gpu.name),
        "get_device_capability": functions.make_device_query((major, minor)),
        "get_device_properties": functions.make_device_query(properties),
    }


def _map_accelerator_functions(cuda_functions: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: cuda_functions[cuda_name] for name, cuda_name in _CUDA_EQUIVALENTS.items()},
        "current_accelerator": make_constant_function(torch.device("cuda")),
        "get_device_capability": _make_rejection(
            "asks torch.accelerator for its capability", "ask torch.cuda for the GPU's"
        ),
        "Graph": _make_rejection("makes a torch.accelerator.Graph", "make a torch.cuda.CUDAGraph"),
    }


def _patch_allocator_functions(functions: _CudaFunctions, context: InstallContext) -> Iterator[Patch]:
    """Yield patches of the allocator's snapshot and settings, and of the release of cuBLAS workspaces."""
    yield cuda.record_memory_history.patch(functions.history.record)
    # Read by memory_snapshot, _snapshot and _dump_snapshot.
    yield cuda.memory_snapshot.patch(functions.snapshot)
    yield cuda.clear_cublas_workspaces.patch(context.dispatch_mode.clear_workspaces)
    yield cuda.set_allocator_settings.patch(_make_distinct(context.settings.set))
    for function, answer in (
        (cuda.accelerator_set_allocator_settings, context.settings.set),
        (cuda.accelerator_get_allocator_settings, context.settings.get),
    ):
        if function.exists():  # releases differ
            yield function.patch(answer)


def _patch_build_properties(context: InstallContext) -> Iterator[Patch]:
    """Yield patches that make torch report a build with CUDA, cuDNN and NVTX."""
    nvtx = SimpleNamespace(
        rangePushA=make_constant_function(0),
        rangePop=make_constant_function(0),
        rangeStartA=make_constant_function(0),
        rangeEnd=make_constant_function(None),
        markA=make_constant_function(None),
    )
    yield cuda.nvtx.patch(nvtx)
    if torch.version.cuda is None:  # a CPU build; programs derive bfloat16 support from the version
        yield torch.version, "cuda", context.libraries.cuda
        yield torch.backends.cuda, "is_built", make_constant_function(True)
    yield torch.backends.cudnn, "is_available", make_constant_function(True)
    yield torch.backends.cudnn, "version", make_constant_function(context.libraries.cudnn)
    yield torch.backends.cudnn, "is_acceptable", is_acceptable
    yield torch.backends.cudnn.rnn, "get_cudnn_mode", lambda mode: MODES[mode.lower()]
    yield kernels.use_cudnn_rnn_flatten_weight.patch(make_constant_function(True))


class _MemoryHistory:
    """The history of `torch.cuda.memory._record_memory_history`: the last entries while it is enabled, else empty
    (torch/csrc/cuda/memory_snapshot.cpp)."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._first_event: int | None = None
        self._limit = 0

    def record(
        self,
        enabled: str | bool | None = "all",
        context: Any = "all",
        stacks: Any = "all",
        max_entries: int = sys.maxsize,
        device: Any = None,
        clear_history: bool = False,
        trace_alloc_max_entries: int = 1,
        **unused: object,
    ) -> None:
        """Start or stop the history; a boolean `enabled` selects torch's legacy limit, `trace_alloc_max_entries`."""
        if not enabled:
            self._first_event = None
            return
        if self._first_event is None or clear_history:
            self._first_event = len(self._trace.events)
        self._limit = max_entries if enabled == "all" else trace_alloc_max_entries if enabled is True else 1

    def trim_snapshot(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """Return `snapshot` with the recorded history only; in memprof, `time_us` is an event's index in the trace."""
        begin = len(self._trace.events) if self._first_event is None else self._first_event
        traces = [[e for e in trace if e["time_us"] >= begin][-self._limit :] for trace in snapshot["device_traces"]]
        return {**snapshot, "device_traces": traces}


class _CudaFunctions:
    """Replacements of functions of `torch.cuda`; the methods have the functions' names."""

    def __init__(self, context: InstallContext) -> None:
        self._context = context
        self._gpus, self._streams = context.gpus, context.recorder.streams
        self._fraction = 1.0
        self.history = _MemoryHistory(context.recorder.trace)

    # -- devices ------------------------------------------------------------------------------------------------------

    def current_device(self) -> int:
        return self._gpus.current

    def set_device(self, device: Any) -> None:
        self._gpus.select(device)

    def synchronize(self, device: Any = None) -> None:
        self._streams.record_host_wait_for_all(self._gpus.devices[self._gpus.mark_used(device)])

    def make_device_query(self, value: Any) -> Callable[..., Any]:
        """Return a function of a device that returns `value`, as all GPUs are equal, and raises for unknown devices."""

        def answer(device: Any = None) -> Any:
            try:
                self._gpus.index(device)
            except RuntimeError:
                raise AssertionError("Invalid device id") from None
            return value

        return answer

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return make_rng_state()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [make_rng_state() for _ in self._gpus.devices]

    # -- memory -------------------------------------------------------------------------------------------------------

    def _get_statistics(self, device: Any) -> MemoryStatistics:
        return self._context.memory.get_statistics(self._gpus.get_name(device))

    def make_statistic_function(self, name: str) -> Callable[..., int]:
        return lambda device=None: self._get_statistics(device).stats()[name]

    def empty_cache(self) -> None:
        self._context.recorder.writer.append_empty_cache()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        total = self._context.gpu.total_bytes
        return max(0, total - self._context.used_bytes(self._gpus.devices[self._gpus.mark_used(device)])), total

    def device_memory_used(self, device: Any = None) -> int:
        free, total = self.mem_get_info(device)
        return total - free

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return collections.defaultdict(int, self._get_statistics(device).stats())

    def memory_stats_as_nested_dict(self, device: Any = None) -> dict[str, Any]:
        nested: dict[str, Any] = {}
        for name, value in self._get_statistics(device).stats().items():
            *path, leaf = name.split(".")
            functools.reduce(lambda table, part: table.setdefault(part, {}), path, nested)[leaf] = value
        return nested

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._get_statistics(device).reset_peak()

    def reset_accumulated_memory_stats(self, device: Any = None) -> None:
        self._get_statistics(device).reset_accumulated()

    def set_per_process_memory_fraction(self, value: float, device: Any = None) -> None:
        if not isinstance(value, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= value <= 1:
            raise ValueError(f"Invalid fraction value: {value}. Allowed range: 0~1")
        self._fraction = value
        others = [part for part in self._context.settings.get().split(",") if part and not part.startswith(_FRACTION)]
        self._context.settings.set(",".join([*others, f"{_FRACTION}:{value}"]))

    def get_per_process_memory_fraction(self, device: Any = None) -> float:
        return self._fraction

    def snapshot(self, *args: Any) -> dict[str, Any]:
        snapshots = [self._context.memory.get_statistics(device).snapshot() for device in self._gpus.devices]
        segments = [{**s, "device": index} for index, snapshot in enumerate(snapshots) for s in snapshot["segments"]]
        traces = [trace for snapshot in snapshots for trace in snapshot["device_traces"]]
        return self.history.trim_snapshot({**snapshots[0], "segments": segments, "device_traces": traces})

    # -- streams ------------------------------------------------------------------------------------------------------

    def set_stream(self, stream: Any) -> None:
        if stream is not None:
            self._streams.select_stream(self._gpus.get_name(stream.device), stream.stream_id)
            self._gpus.select(stream.device)

    def current_stream(self, device: Any = None) -> streams.CudaStream:
        device_name = self._gpus.get_name(device)
        return streams.CudaStream(device_name, stream_id=self._streams.get_current_stream(device_name))

    def default_stream(self, device: Any = None) -> streams.CudaStream:
        return streams.CudaStream(self._gpus.get_name(device), stream_id=0)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        for part in get_sparse_parts(tensor) or [tensor]:
            index = self._context.recorder.storages.get_index(part)
            if index != NONE:
                self._streams.record_use(index, stream.stream_id)


def _make_rejection(problem: str, hint: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise unsupported_error(problem, hint)

    return refuse


def _make_distinct(value: Any) -> Any:
    """Return a wrapper or subclass of `value`: torch.compile's tables need a different object for each name."""
    if isinstance(value, type):
        return type(value.__name__, (value,), {})
    return lambda *args, **kwargs: value(*args, **kwargs)
