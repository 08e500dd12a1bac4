"""Functions that `torch.cuda`, `torch.xpu` and `torch.accelerator` share, as a program calls them: devices, memory,
streams. The folders `cuda_api/` and `xpu_api/` put them into torch's modules, integrations/accelerator.py the rest."""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from memprof.trace.events import NONE, Trace
from memprof.virtual.allocator_answers import MemoryStatistics
from memprof.virtual.generators import make_rng_state
from memprof.virtual.install_context import InstallContext
from memprof.virtual.limits import unsupported_error
from memprof.virtual.streams import GpuStream
from memprof.watch.wrappers import get_sparse_parts

# Functions that return one of the caching allocator's statistics.
STATISTICS = {
    "memory_allocated": "allocated_bytes.all.current",
    "max_memory_allocated": "allocated_bytes.all.peak",
    "memory_reserved": "reserved_bytes.all.current",
    "max_memory_reserved": "reserved_bytes.all.peak",
}
# Functions that are methods of `GpuFunctions`.
GPU_METHODS = (
    "current_device", "set_device", "synchronize", "empty_cache", "mem_get_info", "memory_stats",
    "memory_stats_as_nested_dict", "reset_peak_memory_stats", "reset_accumulated_memory_stats", "device_memory_used",
    "set_per_process_memory_fraction", "get_per_process_memory_fraction", "set_stream", "current_stream",
    "default_stream", "get_rng_state", "get_rng_state_all",
)  # fmt: skip
_FRACTION = "per_process_memory_fraction"


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


class GpuFunctions:
    """Replacements of functions that `torch.cuda`, `torch.xpu` and `torch.accelerator` share; the methods have the
    functions' names."""

    def __init__(self, context: InstallContext) -> None:
        self._context = context
        self.gpus, self._streams = context.gpus, context.recorder.streams
        self._fraction = 1.0
        self.history = _MemoryHistory(context.recorder.trace)

    # -- devices ------------------------------------------------------------------------------------------------------

    def current_device(self) -> int:
        return self.gpus.current

    def set_device(self, device: Any) -> None:
        self.gpus.select(device)

    def synchronize(self, device: Any = None) -> None:
        self._streams.record_host_wait_for_all(self.gpus.devices[self.gpus.mark_used(device)])

    def make_device_query(self, value: Any) -> Callable[..., Any]:
        """Return a function of a device that returns `value`, as all GPUs are equal, and raises for unknown devices."""

        def answer(device: Any = None) -> Any:
            try:
                self.gpus.index(device)
            except RuntimeError:
                raise AssertionError("Invalid device id") from None
            return value

        return answer

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return make_rng_state()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [make_rng_state() for _ in self.gpus.devices]

    # -- memory -------------------------------------------------------------------------------------------------------

    def _get_statistics(self, device: Any) -> MemoryStatistics:
        return self._context.memory.get_statistics(self.gpus.get_name(device))

    def make_statistic_function(self, name: str) -> Callable[..., int]:
        return lambda device=None: self._get_statistics(device).stats()[name]

    def empty_cache(self) -> None:
        self._context.recorder.writer.append_empty_cache()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        total = self._context.gpu.total_bytes
        return max(0, total - self._context.used_bytes(self.gpus.devices[self.gpus.mark_used(device)])), total

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
        snapshots = [self._context.memory.get_statistics(device).snapshot() for device in self.gpus.devices]
        segments = [{**s, "device": index} for index, snapshot in enumerate(snapshots) for s in snapshot["segments"]]
        traces = [trace for snapshot in snapshots for trace in snapshot["device_traces"]]
        return self.history.trim_snapshot({**snapshots[0], "segments": segments, "device_traces": traces})

    # -- streams ------------------------------------------------------------------------------------------------------

    def set_stream(self, stream: Any) -> None:
        if stream is not None:
            self._streams.select_stream(self.gpus.get_name(stream.device), stream.stream_id)
            self.gpus.select(stream.device)

    def current_stream(self, device: Any = None) -> GpuStream:
        device_name = self.gpus.get_name(device)
        return GpuStream(device_name, stream_id=self._streams.get_current_stream(device_name))

    def default_stream(self, device: Any = None) -> GpuStream:
        return GpuStream(self.gpus.get_name(device), stream_id=0)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        for part in get_sparse_parts(tensor) or [tensor]:
            index = self._context.recorder.storages.get_index(part)
            if index != NONE:
                self._streams.record_use(index, stream.stream_id)


def make_constant_function(value: Any) -> Callable[..., Any]:
    """Return a function that returns `value` for any arguments."""
    return lambda *args, **kwargs: value


def make_rejection(problem: str, hint: str) -> Callable[..., Any]:
    """Return a function that raises the error for an unsupported operation."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise unsupported_error(problem, hint)

    return refuse


def make_distinct(value: Any) -> Any:
    """Return a wrapper or subclass of `value`: torch.compile's tables need a different object for each name."""
    if isinstance(value, type):
        return type(value.__name__, (value,), {})
    return lambda *args, **kwargs: value(*args, **kwargs)
