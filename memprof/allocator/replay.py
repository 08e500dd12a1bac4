"""A whole run through the allocator: what is requested, allocated and reserved at every event.

`replay` takes any stream of requests and frees; `replay_trace` takes a Trace. A run that does not fit is gone on with
after its first out-of-memory error, on a card that has no limit from there, so that its whole need is known.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from memprof.allocator.blocks import Block
from memprof.allocator.caching import CachingAllocator
from memprof.allocator.config import AllocatorConfig
from memprof.allocator.driver import SimulatedDriver
from memprof.allocator.messages import OomReport, OutOfMemory
from memprof.allocator.pools import SegmentLayout
from memprof.allocator.releases import LATEST, Release
from memprof.allocator.streams import Completion
from memprof.trace.events import GPU, EventKind, Trace


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest value of a counter, and the first event that reached it (-1: before the first)."""

    num_bytes: int = 0
    event: int = -1


@dataclass(frozen=True, slots=True)
class FirstOom:
    """Where the run would have ended."""

    event: int
    report: OomReport
    message: str
    """What torch prints there."""


@dataclass(slots=True)
class Timeline:
    """What the allocator held after each event. Columns have one entry per event."""

    requested: array[int] = field(default_factory=lambda: array("q"))
    allocated: array[int] = field(default_factory=lambda: array("q"))
    active: array[int] = field(default_factory=lambda: array("q"))
    reserved: array[int] = field(default_factory=lambda: array("q"))
    peak_requested: Peak = Peak()
    peak_allocated: Peak = Peak()
    peak_active: Peak = Peak()
    peak_reserved: Peak = Peak()
    """Within an event the allocator may hold more than after it, when it gives segments back to get another."""
    first_oom: FirstOom | None = None
    retries: int = 0
    """Times that the whole cache was given back because the driver refused (num_alloc_retries)."""
    stats: dict[str, int] = field(default_factory=dict)
    """torch.cuda.memory_stats() at the end."""
    segments: list[SegmentLayout] = field(default_factory=list)
    """Segments and blocks at the end: what is fragmented, and where."""

    @property
    def fits(self) -> bool:
        """Whether no request was refused."""
        return self.first_oom is None


class Replayer:
    """Feeds one allocator request by request, and writes the timeline.

    Args:
        allocator: a fresh one; its driver's limit is lifted at the first out-of-memory error.
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.timeline = Timeline()
        self.event = 0
        self._peaks = [0, 0, 0, 0]
        self._peak_events = [-1, -1, -1, -1]

    def malloc(self, num_bytes: int, stream: int = 0) -> Block:
        """Serve a request, on a card without limit once one was refused."""
        try:
            return self.allocator.malloc(num_bytes, stream)
        except OutOfMemory as error:
            if self.timeline.first_oom is None:
                self.timeline.first_oom = FirstOom(self.event, error.report, str(error))
            if not isinstance(self.allocator.driver, SimulatedDriver):
                raise
            self.allocator.driver.lift_limit()
            self.allocator.lift_limit()
            return self.allocator.malloc(num_bytes, stream)

    def end_event(self, *, grew: bool) -> None:
        """Write down what is held after the event; peaks can only move when something was requested (`grew`)."""
        counters = self.allocator.statistics.all
        timeline = self.timeline
        timeline.requested.append(counters.requested_bytes)
        timeline.allocated.append(counters.allocated_bytes)
        timeline.active.append(counters.active_bytes)
        timeline.reserved.append(counters.reserved_bytes)
        if grew:
            peaks, events = self._peaks, self._peak_events
            if counters.requested_bytes_peak > peaks[0]:
                peaks[0], events[0] = counters.requested_bytes_peak, self.event
            if counters.allocated_bytes_peak > peaks[1]:
                peaks[1], events[1] = counters.allocated_bytes_peak, self.event
            if counters.active_bytes_peak > peaks[2]:
                peaks[2], events[2] = counters.active_bytes_peak, self.event
            if counters.reserved_bytes_peak > peaks[3]:
                peaks[3], events[3] = counters.reserved_bytes_peak, self.event
        self.event += 1

    def finish(self) -> Timeline:
        """The timeline with its peaks, statistics and final layout."""
        timeline = self.timeline
        found = [Peak(*pair) for pair in zip(self._peaks, self._peak_events, strict=True)]
        timeline.peak_requested, timeline.peak_allocated, timeline.peak_active, timeline.peak_reserved = found
        timeline.stats = self.allocator.stats()
        timeline.retries = self.allocator.statistics.num_alloc_retries
        timeline.segments = self.allocator.segments()
        return timeline


def replay(
    requests: Iterable[tuple[int, int]],
    usable_bytes: int | None = None,
    config: AllocatorConfig | None = None,
    release: Release = LATEST,
    *,
    completion: Completion = Completion.IMMEDIATE,
) -> Timeline:
    """Replay (name, bytes) requests on one stream: bytes > 0 allocates `name`, bytes = 0 frees it.

    Args:
        requests: what the program did, in order. A name may be used again once it is freed.
        usable_bytes: what the allocator may reserve; None: without limit.
        config: the settings.
        release: whose rules.
        completion: see Completion.
    """
    allocator = CachingAllocator(usable_bytes, config, release, completion=completion)
    player = Replayer(allocator)
    live: dict[int, Block] = {}
    for name, num_bytes in requests:
        if num_bytes:
            live[name] = player.malloc(num_bytes)
        else:
            allocator.free(live.pop(name))
        player.end_event(grew=num_bytes > 0)
    return player.finish()


def replay_trace(
    trace: Trace,
    usable_bytes: int | None = None,
    config: AllocatorConfig | None = None,
    release: Release = LATEST,
    *,
    device: str = GPU,
    total_bytes: int | None = None,
) -> Timeline:
    """Replay the storages of one device of a trace; the timeline has an entry for each of its events.

    Args:
        trace: events other than ALLOC and FREE, storages of other devices and empty storages change nothing.
        usable_bytes: what the allocator may reserve: the card's memory less the CUDA context and other users.
            None: without limit.
        config: the settings.
        release: whose rules.
        device: the device of the trace.
        total_bytes: capacity of the card for messages and fractions; `usable_bytes` unless given.
    """
    total = usable_bytes if total_bytes is None else total_bytes
    other = 0 if total is None or usable_bytes is None else total - usable_bytes
    allocator = CachingAllocator(total, config, release, SimulatedDriver(total, other))
    player = Replayer(allocator)
    sizes = _sizes(trace, device)
    live: dict[int, Block] = {}
    malloc, free, end_event = player.malloc, allocator.free, player.end_event
    for kind, ref in trace.events:
        if kind == EventKind.ALLOC and sizes[ref]:
            live[ref] = malloc(sizes[ref])
            end_event(grew=True)
            continue
        if kind == EventKind.FREE and ref in live:
            free(live.pop(ref))
        end_event(grew=False)
    return player.finish()


def _sizes(trace: Trace, device: str) -> Sequence[int]:
    """Bytes of each storage; 0 for those of other devices."""
    return [storage.num_bytes if storage.device == device else 0 for storage in trace.storages]
