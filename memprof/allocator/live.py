"""Replay of a run that is still in progress, so that the program can read its own memory statistics."""

from __future__ import annotations

from typing import Any

from memprof.allocator.config import AllocatorConfig
from memprof.allocator.messages import OutOfMemory
from memprof.allocator.releases import LATEST, Release
from memprof.allocator.replay import GpuMemory, TraceReplay
from memprof.allocator.rounding import SMALL_BUFFER, SMALL_SIZE
from memprof.trace.events import Trace

# Counters that `resetAccumulatedStats` of c10/cuda/CUDACachingAllocator.cpp resets besides `.allocated` and `.freed`.
_RESET_COUNTERS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")


class LiveAllocator:
    """The allocator at the current end of a growing trace: each query replays the events since the last query."""

    def __init__(
        self, trace: Trace, gpu: GpuMemory, config: AllocatorConfig | None = None, release: Release = LATEST
    ) -> None:
        self._min_room = 0  # bytes that can certainly still be reserved
        self._large_segment = (config or AllocatorConfig()).large_segment_size
        self._trace = trace
        self._gpu = gpu
        self._release = release
        self._replay = TraceReplay(trace, gpu, config, release)
        self._reset_values: dict[str, int] = {}  # accumulated counters at their last reset

    def change_settings(self, other: Any) -> None:
        """Use the settings of the allocator `other` for requests from now on."""
        self._replay.advance(writes=False)
        self._replay.allocator.change_config(other._replay.allocator.config)
        self._large_segment = other._large_segment

    def find_oom_message(self) -> str | None:
        """Return the message of torch.OutOfMemoryError if the last event is a failed allocation; None if it succeeds.

        As in torch, the allocator continues with a released cache and without the allocation. The caller adds the
        storage to `Trace.refused`.
        """
        replay, trace = self._replay, self._trace
        last_event = len(trace.events) - 1
        storage = trace.events[last_event].ref
        num_bytes = trace.storages[storage].num_bytes
        self._min_room -= self._max_segment_size(num_bytes)
        if self._min_room >= 0:
            return None
        replay.advance(last_event, writes=False)
        replay.event = last_event + 1
        try:
            replay.live[storage] = replay.allocator.malloc(num_bytes, replay.stream)
        except OutOfMemory as error:
            return error.report.add_process_bytes(self._gpu.context_bytes).message(self._release)
        usable, allowed = self._gpu.usable_bytes, replay.allocator.allowed_bytes
        limit = usable if allowed is None else min(allowed, usable)
        self._min_room = limit - replay.allocator.counters.reserved_bytes
        if self._gpu.backend == "mps":
            self._min_room = 0  # the bounds below are those of the caching allocator
        return None

    def _max_segment_size(self, num_bytes: int) -> int:
        """Return an upper bound of the bytes that a request of `num_bytes` reserves. As long as there is room for the
        bounds of all requests, none fails, and none must be replayed. Small blocks come from segments of 2 MiB; the
        segment of another is its size, at most doubled by `roundup_power2_divisions`, or `large_segment_size`."""
        if num_bytes <= SMALL_SIZE // 2:
            return SMALL_BUFFER
        return 2 * num_bytes + self._large_segment + SMALL_BUFFER

    def stats(self) -> dict[str, int]:
        """Return the current torch.cuda.memory_stats()."""
        stats = self._get_current_stats()
        return {name: value - self._reset_values.get(name, 0) for name, value in stats.items()}

    def reset_peak(self) -> None:
        """Reset the peaks (torch.cuda.reset_peak_memory_stats())."""
        self._replay.advance(writes=False)
        self._replay.allocator.statistics.reset_peak()

    def reset_accumulated(self) -> None:
        """Reset the totals (torch.cuda.reset_accumulated_memory_stats())."""
        stats = self._get_current_stats()
        self._reset_values = {
            name: stats[name] for name in stats if name.endswith((".allocated", ".freed")) or name in _RESET_COUNTERS
        }

    def _get_current_stats(self) -> dict[str, int]:
        self._replay.advance(writes=False)
        return self._replay.allocator.stats()
