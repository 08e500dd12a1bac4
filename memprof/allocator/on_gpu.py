"""A run on one GPU: what it holds there, whether it fits, and the error that ends it if not."""

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

Layout = tuple[list[SnapshotSegment], dict[int, int]]  # and the storage in each block by its address


class MemoryNeeds(NamedTuple):
    """The memory that a run needs, in short."""

    required_reserved_bytes: int  # as in OnGpu
    fits: bool  # True without a GPU
    allocated_bytes: int  # the most that tensors take, as the allocator rounds it on a GPU without limit


class StreamBounds(NamedTuple):
    """The most that is reserved if what other streams used is free as soon, and as late, as it can be."""

    lower_bound_bytes: int  # it is free at once
    upper_bound_bytes: int  # it is free only once the host has waited for those streams


@dataclass(frozen=True, slots=True)
class GpuReplay:
    """One run through the allocator of one GPU."""

    trace: Trace
    gpu: GpuMemory | None
    config: AllocatorConfig
    release: Release
    timeline: Timeline  # if it fits (or without a GPU), what the run holds on this GPU; else, on a GPU without limit
    first_oom: FirstOom | None  # the request that this GPU refuses; None: it fits
    retries: int  # times that the allocator released its whole cache for a request, and could serve it
    # The most that is reserved on a GPU without limit: so much, and nothing is ever released to make room. Requests
    # that the program was refused and went on without are not in it.
    required_reserved_bytes: int
    # Storages of requests that the program, or a library with a workspace, was refused and went on without.
    refused: frozenset[int] = frozenset()
    rounds: bool = True  # whether requests are rounded to blocks; in host memory they are not
    bounds: StreamBounds | None = None  # of `required_reserved_bytes`; None: no stream uses another's memory
    _layouts: dict[int, Layout] = field(default_factory=dict, repr=False, compare=False)  # by event

    def layout_at(self, event: int) -> Layout:
        """Segments and blocks after `event` of the timeline's run, and the storage in each block by its address."""
        self.prepare_layouts((event,))
        return self._layouts[event]

    def prepare_layouts(self, events: Iterable[int]) -> None:
        """Find the layouts after several events, for `layout_at`, in one replay."""
        wanted = sorted(set(events) - self._layouts.keys())
        if not wanted:
            return
        limited = self.gpu is not None and self.first_oom is None
        replay = TraceReplay(self.trace, self.gpu if limited else None, self.config, self.release, counts=False)
        for event in wanted:
            replay.advance(event + 1, writes=False)
            self._layouts[event] = _layout(replay)

    def layout_at_oom(self) -> Layout:
        """Return, as `layout_at`, the layout when the GPU refuses the request and all has been released that can be.
        Raises ValueError: nothing is refused."""
        if self.first_oom is None:
            raise ValueError("the run fits")
        replay = TraceReplay(self.trace, self.gpu, self.config, self.release, counts=False)
        replay.advance(self.first_oom.event, writes=False)
        replay.allocator.empty_cache()
        return _layout(replay)

    @property
    def fits(self) -> bool:
        """Return whether nothing is refused; True without a GPU."""
        return self.first_oom is None

    def under(self, config: AllocatorConfig) -> MemoryNeeds:
        """Return what the same run would need with other settings."""
        return needs_of(self.trace, self.gpu, config, self.release)


def needs_of(trace: Trace, gpu: GpuMemory | None, config: AllocatorConfig, release: Release = LATEST) -> MemoryNeeds:
    """Return what `trace` needs, in a fraction of the time of `replay_on_gpu`."""
    replay = TraceReplay(trace, None, config, release)
    replay.advance(writes=False)
    counters = replay.allocator.counters
    required = counters.reserved_bytes_peak
    fits = True
    if gpu is not None:
        limit = min(gpu.usable_bytes, int(config.per_process_memory_fraction * gpu.total_bytes))
        fits = required <= limit
        if not fits and counters.allocated_bytes_peak <= limit:  # perhaps by giving the cache back
            limited = TraceReplay(trace, gpu, config, release, counts=False)
            limited.advance(writes=False)
            fits = limited.timeline.first_oom is None
    return MemoryNeeds(required, fits, counters.allocated_bytes_peak)


def replay_on_gpu(
    trace: Trace, gpu: GpuMemory | None, config: AllocatorConfig | None = None, release: Release = LATEST
) -> GpuReplay:
    """Replay `trace` on `gpu`, and on one without limit where the two differ; None: there is no GPU to judge by.
    Raises UsageError: settings that ask for another allocator."""
    config = AllocatorConfig() if config is None else config
    bounds = _bounds(trace, config, release)
    first = TraceReplay(trace, gpu, config, release)
    first.advance(stop_at_oom=True)
    timeline = first.finish()
    oom, retries = timeline.first_oom, timeline.retries
    refused = first.refused | set(trace.refused)
    # A GPU without limit would have done the same, but for what it was requested in vain when the program ran.
    if gpu is None or not (first.was_limited or refused):
        required = timeline.peak_reserved.num_bytes
        return GpuReplay(trace, gpu, config, release, timeline, None, 0, required, bounds=bounds)
    free = TraceReplay(trace, None, config, release)
    free.refused |= first.refused
    free.advance()
    unlimited = free.finish()
    required = unlimited.peak_reserved.num_bytes
    if oom is None:
        return GpuReplay(
            trace, gpu, config, release, timeline, None, retries, required, frozenset(refused), bounds=bounds
        )
    report = oom.report.of_process(gpu.context_bytes)
    oom = FirstOom(oom.event, report, report.message(release))
    return GpuReplay(
        trace, gpu, config, release, unlimited, oom, max(retries - 1, 0), required, frozenset(refused), bounds=bounds
    )


def _bounds(trace: Trace, config: AllocatorConfig, release: Release) -> StreamBounds | None:
    if not any(trace.storages[use.storage].device == trace.device for use in trace.uses):
        return None
    most: list[int] = []
    for completion in (Completion.IMMEDIATE, Completion.AT_SYNC):
        replay = TraceReplay(trace, None, config, release, completion, counts=False)
        replay.advance(writes=False)
        most.append(replay.allocator.counters.reserved_bytes_peak)
    return StreamBounds(*most)


def _layout(replay: TraceReplay) -> Layout:
    return replay.allocator.segments(), {block.address: ref for ref, block in replay.live.items()}


def replay_in_host_memory(trace: Trace) -> GpuReplay:
    """Return a run in host memory: what is requested is allocated, and there is no cache to reserve."""
    timeline = Timeline()
    now, most = 0, TimelinePeak()
    for time, (kind, ref) in enumerate(trace.events):
        if kind in (EventKind.ALLOC, EventKind.FREE) and trace.storages[ref].device == trace.device:
            num_bytes = trace.storages[ref].num_bytes
            now += num_bytes if kind is EventKind.ALLOC else -num_bytes
            if now > most.num_bytes:
                most = TimelinePeak(now, time)
        for column in (timeline.requested, timeline.allocated, timeline.reserved):
            column.append(now)
    timeline.peak_reserved = most
    return GpuReplay(trace, None, AllocatorConfig(), LATEST, timeline, None, 0, most.num_bytes, rounds=False)
