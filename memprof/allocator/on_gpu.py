"""Replay of a run on one GPU: the memory that it needs, whether it fits, and the error that ends it if it does not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from memprof.allocator.config import AllocatorConfig
from memprof.allocator.releases import LATEST, Release
from memprof.allocator.replay import FirstOom, GpuMemory, Timeline, TimelinePeak, TraceReplay
from memprof.allocator.streams import Completion
from memprof.trace.events import EventKind, Trace
from memprof.trace.snapshot import SnapshotSegment

Layout = tuple[list[SnapshotSegment], dict[int, int]]  # segments; address of a block -> index of its storage


class MemoryNeeds(NamedTuple):
    """The memory that a run needs, and whether it fits."""

    required_reserved_bytes: int  # as in GpuReplay
    fits: bool  # True without a GPU
    allocated_bytes: int  # peak of allocated bytes, on a GPU without limit
    # Whether `required_reserved_bytes` are more than there is, and the run fits because cached segments are released.
    releases_cache: bool = False


class StreamBounds(NamedTuple):
    """Bounds of the reserved peak, if memory used by other streams is freed as early, or as late, as possible."""

    lower_bound_bytes: int  # if this memory is free at once
    upper_bound_bytes: int  # if it is free only once the host has waited for those streams


@dataclass(frozen=True, slots=True)
class GpuReplay:
    """The replay of one run through the allocator of one GPU."""

    trace: Trace
    gpu: GpuMemory | None
    config: AllocatorConfig
    release: Release
    timeline: Timeline  # of the run on this GPU if it fits (or without a GPU); else on a GPU without limit
    first_oom: FirstOom | None  # the first failed allocation; None: the run fits
    retries: int  # times that an allocation succeeded only after the whole cache was released
    # The reserved peak on a GPU without limit: with this much, cached memory is never released to make room. Failed
    # allocations that the program survived are not included.
    required_reserved_bytes: int
    # Storages of failed allocations that the program, or a library with a workspace, survived.
    refused: frozenset[int] = frozenset()
    rounds: bool = True  # whether requests are rounded to blocks; not in host memory
    bounds: StreamBounds | None = None  # of `required_reserved_bytes`; None: no stream uses another's memory
    _layouts: dict[int, Layout] = field(default_factory=dict, repr=False, compare=False)  # by event
    _needs: dict[AllocatorConfig, MemoryNeeds] = field(default_factory=dict, repr=False, compare=False)

    def layout_at(self, event: int) -> Layout:
        """Return the segments after the event at index `event`, and the storage of each block by its address."""
        self.prepare_layouts((event,))
        return self._layouts[event]

    def prepare_layouts(self, events: Iterable[int]) -> None:
        """Compute the layouts after `events` in one replay, so that `layout_at` returns them at once."""
        missing_events = sorted(set(events) - self._layouts.keys())
        if not missing_events:
            return
        is_limited = self.gpu is not None and self.first_oom is None
        replay = TraceReplay(self.trace, self.gpu if is_limited else None, self.config, self.release, counts=False)
        for event in missing_events:
            replay.advance(event + 1, writes=False)
            self._layouts[event] = _get_layout(replay)

    def layout_at_oom(self) -> Layout:
        """Return the layout (see `layout_at`) at the first failed allocation, after cached segments were released.
        Raises ValueError: no allocation fails."""
        if self.first_oom is None:
            raise ValueError("the run fits")
        replay = TraceReplay(self.trace, self.gpu, self.config, self.release, counts=False)
        replay.advance(self.first_oom.event, writes=False)
        replay.allocator.empty_cache()
        return _get_layout(replay)

    @property
    def fits(self) -> bool:
        """Return whether no allocation fails; True without a GPU."""
        return self.first_oom is None

    @property
    def has_expandable_segments(self) -> bool:
        """Return whether expandable segments can be advised: CUDA's allocator has the setting."""
        return self.release.has_expandable_segments and (self.gpu is None or self.gpu.backend == "cuda")

    @property
    def least_reserved_bytes(self) -> int:
        """Return what the run needs at least: of one that memory ended what was reserved beside the failed request,
        once cached segments were released, if that is less than without releasing any."""
        if self.first_oom is None or not self.trace.ended_out_of_memory:
            return self.required_reserved_bytes
        report = self.first_oom.report
        return min(self.required_reserved_bytes, report.reserved_bytes + report.tried_bytes)

    def compute_needs(self, config: AllocatorConfig) -> MemoryNeeds:
        """Return the memory needs of this run with other allocator settings; several findings may ask for the same."""
        if config not in self._needs:
            self._needs[config] = compute_memory_needs(self.trace, self.gpu, config, self.release)
        return self._needs[config]


def compute_memory_needs(
    trace: Trace, gpu: GpuMemory | None, config: AllocatorConfig, release: Release = LATEST
) -> MemoryNeeds:
    """Return the memory needs of `trace` on `gpu`, faster than `replay_on_gpu`."""
    replay = TraceReplay(trace, None, config, release, counts=False)
    replay.advance(writes=False)
    required = replay.allocator.counters.reserved_bytes_peak
    fits, releases_cache = True, False
    if gpu is not None:
        limit = gpu.compute_limit(config)
        # Of a fraction each request must fit in whole, though a part of an expandable segment may be mapped already.
        fits = required <= limit and not (config.expandable_segments and config.per_process_memory_fraction < 1)
        fits = fits and not _has_too_long_buffer(trace, gpu)
        if not fits and replay.allocated_peak <= limit:  # perhaps after releasing the cache
            limited_replay = TraceReplay(trace, gpu, config, release, counts=False)
            limited_replay.advance(writes=False)
            timeline = limited_replay.timeline
            fits = timeline.first_oom is None
            releases_cache = fits and limited_replay.allocator.statistics.num_alloc_retries > 0
    return MemoryNeeds(required, fits, replay.allocated_peak, releases_cache)


def _has_too_long_buffer(trace: Trace, gpu: GpuMemory) -> bool:
    """Return whether a storage may be longer than the GPU's buffers; a replay on this GPU says whether one fails."""
    limit = gpu.max_buffer_bytes
    return limit is not None and any(s.num_bytes >= limit and s.device == trace.device for s in trace.storages)


def replay_on_gpu(
    trace: Trace, gpu: GpuMemory | None, config: AllocatorConfig | None = None, release: Release = LATEST
) -> GpuReplay:
    """Replay `trace` on `gpu` (None: a GPU of unlimited size); if it does not fit, also on an unlimited one. Raises
    UsageError: the settings select another allocator."""
    config = AllocatorConfig() if config is None else config
    bounds = _find_stream_bounds(trace, config, release)
    gpu_replay = TraceReplay(trace, gpu, config, release)
    gpu_replay.advance(stop_at_oom=True)
    timeline = gpu_replay.finish()
    oom, retries = timeline.first_oom, timeline.retries
    refused = gpu_replay.refused | set(trace.refused)
    # A GPU without limit gives the same result, except for failed allocations that the program survived.
    if gpu is None or not (gpu_replay.was_limited or refused):
        required = timeline.peak_reserved.num_bytes
        return GpuReplay(trace, gpu, config, release, timeline, None, 0, required, bounds=bounds)
    unlimited_replay = TraceReplay(trace, None, config, release)
    unlimited_replay.refused |= gpu_replay.refused
    unlimited_replay.advance()
    unlimited = unlimited_replay.finish()
    required = unlimited.peak_reserved.num_bytes
    if oom is None:
        return GpuReplay(
            trace, gpu, config, release, timeline, None, retries, required, frozenset(refused), bounds=bounds
        )
    report = oom.report.add_process_bytes(gpu.context_bytes)
    oom = FirstOom(oom.event, report, report.message(release))
    return GpuReplay(
        trace, gpu, config, release, unlimited, oom, max(retries - 1, 0), required, frozenset(refused), bounds=bounds
    )


def _find_stream_bounds(trace: Trace, config: AllocatorConfig, release: Release) -> StreamBounds | None:
    if not any(trace.storages[use.storage].device == trace.device for use in trace.uses):
        return None
    peaks: list[int] = []
    for completion in (Completion.IMMEDIATE, Completion.AT_SYNC):
        replay = TraceReplay(trace, None, config, release, completion, counts=False)
        replay.advance(writes=False)
        peaks.append(replay.allocator.counters.reserved_bytes_peak)
    return StreamBounds(*peaks)


def _get_layout(replay: TraceReplay) -> Layout:
    return replay.allocator.segments(), {block.address: ref for ref, block in replay.live.items()}


def replay_in_host_memory(trace: Trace) -> GpuReplay:
    """Return a replay of `trace` in host memory, where requests are not rounded and nothing is cached."""
    timeline = Timeline()
    current_bytes, peak = 0, TimelinePeak()
    for time, (kind, ref) in enumerate(trace.events):
        if kind in (EventKind.ALLOC, EventKind.FREE) and trace.storages[ref].device == trace.device:
            num_bytes = trace.storages[ref].num_bytes
            current_bytes += num_bytes if kind is EventKind.ALLOC else -num_bytes
            if current_bytes > peak.num_bytes:
                peak = TimelinePeak(current_bytes, time)
        for column in (timeline.requested, timeline.allocated, timeline.reserved):
            column.append(current_bytes)
    timeline.peak_reserved = peak
    return GpuReplay(trace, None, AllocatorConfig(), LATEST, timeline, None, 0, peak.num_bytes, rounds=False)
