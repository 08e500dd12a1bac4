"""Replay of a run through the allocator: requested, allocated and reserved bytes after every event.

`TraceReplay` replays a Trace, also one that still grows. A run that does not fit continues after its first
out-of-memory error on a GPU of unlimited size, so that the memory needs of the complete run are known.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from memprof.allocator.blocks import Block
from memprof.allocator.caching import CachingAllocator
from memprof.allocator.config import AllocatorConfig
from memprof.allocator.driver import SimulatedDriver
from memprof.allocator.messages import OomReport, OutOfMemory
from memprof.allocator.mps import MpsAllocator, compute_max_buffer_bytes
from memprof.allocator.releases import LATEST, Release
from memprof.allocator.streams import Completion
from memprof.errors import MemprofError
from memprof.trace.events import NONE, Event, EventKind, Trace, gpu_index
from memprof.trace.facts import DeviceFacts
from memprof.trace.snapshot import DEFAULT_POOL, PoolId, SnapshotSegment

UNLIMITED_BYTES = 1 << 62  # more than any GPU has, and a number that JSON holds


@dataclass(frozen=True, slots=True)
class TimelinePeak:
    """The largest number of bytes, and the index of the first event that reached it (-1: before all events)."""

    num_bytes: int = 0
    event: int = -1


@dataclass(frozen=True, slots=True)
class FirstOom:
    """The first failed allocation, which would end the run."""

    event: int
    report: OomReport
    message: str  # torch's message


@dataclass(slots=True)
class Timeline:
    """The bytes that the allocator holds after each event; arrays have one entry per event."""

    requested: array[int] = field(default_factory=lambda: array("q"))
    allocated: array[int] = field(default_factory=lambda: array("q"))
    reserved: array[int] = field(default_factory=lambda: array("q"))
    peak_reserved: TimelinePeak = TimelinePeak()  # within an event, more may be reserved than after it
    first_oom: FirstOom | None = None
    # Times that the whole cache was released because the driver refused (num_alloc_retries), without failed allocations
    # that the program survived.
    retries: int = 0
    stats: dict[str, int] = field(default_factory=dict)  # torch.cuda.memory_stats() at the end
    segments: list[SnapshotSegment] = field(default_factory=list)  # segments and blocks at the end
    blocks: dict[int, int] = field(default_factory=dict)  # bytes of the block of each storage of this device
    addresses: dict[int, int] = field(default_factory=dict)  # addresses of the same blocks


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory of a GPU, and how much of it the allocator cannot use."""

    total_bytes: int  # as CUDA reports it
    context_bytes: int  # used outside the allocator: the CUDA context, other users
    backend: str = "cuda"  # torch's: "cuda", "hip", "xpu" or "mps", of which `total_bytes` is the working set

    @property
    def usable_bytes(self) -> int:
        """Return the bytes that the allocator can reserve."""
        return max(self.total_bytes - self.context_bytes, 0)

    def compute_limit(self, config: AllocatorConfig) -> int:
        """Return the bytes that the allocator can reserve with settings `config`; `UNLIMITED_BYTES` without limit."""
        if self.backend == "mps":
            return int(config.mps_high_watermark_ratio * self.total_bytes) or UNLIMITED_BYTES
        return min(self.usable_bytes, int(config.per_process_memory_fraction * self.total_bytes))

    @property
    def max_buffer_bytes(self) -> int | None:
        """Return the bytes from which a request is refused by itself; None: there is no such limit."""
        return compute_max_buffer_bytes(self.total_bytes) if self.backend == "mps" else None

    @classmethod
    def of(cls, device: DeviceFacts) -> GpuMemory | None:
        """Return the memory of `device`, in a measured run without that of other processes; None if unknown."""
        total, usable = device.total_bytes, device.usable_bytes
        if total is None:
            return None
        if device.backend == "mps":
            return cls(total, 0, device.backend)
        return cls(total, device.context_bytes if usable is None else total - usable, device.backend)


def apply_stream_event(
    trace: Trace, allocator: CachingAllocator | MpsAllocator, live: Mapping[int, Block], time: int, event: Event
) -> None:
    """Apply `event`, at index `time`, if it concerns the order of streams; `live` has blocks by storage."""
    kind, ref = event
    if kind is EventKind.USE:
        storage, stream = trace.uses[ref]
        if storage in live:
            allocator.record_stream(live[storage], stream)
    elif kind is EventKind.WAIT:
        by_host, stream_events = trace.waits[ref]
        for device, stream, before in stream_events:
            if device == trace.device:
                allocator.pending.record_wait(stream, before, by_host=by_host)
    elif kind is EventKind.PHASE:
        allocator.pending.end_phase(time)


def make_pool_id(pool_index: int) -> PoolId:
    """Return torch's id of the pool with this index in a trace; 0 is the default pool."""
    return (pool_index, 0) if pool_index else DEFAULT_POOL


class TraceReplay:
    """The replay of a trace through an allocator, up to any event or the current end of a growing trace.

    Storages of other devices and empty ones are ignored. After the first out-of-memory error, and without `gpu`, memory
    is unlimited. Without `counts`, only addresses of blocks, reserved bytes, `allocated_peak` and `first_oom` hold.
    """

    def __init__(
        self,
        trace: Trace,
        gpu: GpuMemory | None = None,
        config: AllocatorConfig | None = None,
        release: Release = LATEST,
        completion: Completion = Completion.ORDERED,
        *,
        counts: bool = True,
    ) -> None:
        self.driver = SimulatedDriver(None) if gpu is None else SimulatedDriver(gpu.total_bytes, gpu.context_bytes)
        self.allocator: CachingAllocator | MpsAllocator
        if trace.device.startswith("mps"):
            self.allocator = MpsAllocator(self.driver.total_bytes, config, release)
        else:
            self.allocator = CachingAllocator(
                self.driver.total_bytes, config, release, self.driver, completion=completion, counts=counts
            )
            self.allocator.device = gpu_index(trace.device)
            self.allocator.backend = "cuda" if gpu is None else gpu.backend
        self.trace = trace
        self.timeline = Timeline()
        self.event = 0
        self.live: dict[int, Block] = {}  # blocks of the storages that are live, by storage
        self.allocated = self.allocated_peak = 0  # bytes of these blocks
        self.stream = 0  # current stream
        self.pool = DEFAULT_POOL  # current pool
        self.refused: set[int] = set()  # storages of workspaces that failed, without which the library continues
        self._is_limited = gpu is not None
        self._failed_retries = 0

    def malloc(self, num_bytes: int, stream: int = 0, storage: int = NONE) -> Block | None:
        """Allocate a block, from unlimited memory after the first failure; None if there is no room for a workspace."""
        retries_before = self.allocator.statistics.num_alloc_retries
        try:
            return self.allocator.malloc(num_bytes, stream, self.pool)
        except OutOfMemory as error:
            if self.timeline.first_oom is None and storage in self.trace.optional_storages():
                self.refused.add(storage)
                self._failed_retries += self.allocator.statistics.num_alloc_retries - retries_before
                return None
            if self.timeline.first_oom is None:
                self.timeline.first_oom = FirstOom(self.event, error.report, str(error))
            self.driver.lift_limit()
            self.allocator.lift_limit()
        try:
            return self.allocator.malloc(num_bytes, stream, self.pool)
        except OutOfMemory as error:
            raise MemprofError(
                "the run asks for more memory than can be addressed",
                value=f"{num_bytes:,} bytes at once",
                hint="a shape is probably not what was meant",
            ) from error

    @property
    def was_limited(self) -> bool:
        """Return whether the GPU's size, or a memory fraction, changed any decision of the allocator."""
        is_limited = self.allocator.allowed_bytes is not None or self.timeline.first_oom is not None
        return is_limited or self.driver.num_refusals > 0

    def end_event(self, *, grew: bool) -> None:
        """Append the bytes after the current event to the timeline; `grew`: whether it was an allocation."""
        counters = self.allocator.statistics.all
        timeline = self.timeline
        timeline.requested.append(counters.requested_bytes - self.allocator.pending.requested_bytes)
        timeline.allocated.append(counters.allocated_bytes)
        timeline.reserved.append(counters.reserved_bytes)
        if grew and counters.reserved_bytes_peak > timeline.peak_reserved.num_bytes:
            timeline.peak_reserved = TimelinePeak(counters.reserved_bytes_peak, self.event)
        self.event += 1

    def finish(self) -> Timeline:
        """Return the timeline with its statistics and final layout."""
        timeline = self.timeline
        timeline.stats = self.allocator.stats()
        timeline.retries = self.allocator.statistics.num_alloc_retries - self._failed_retries
        timeline.segments = self.allocator.segments()
        return timeline

    def _repeat_failure(self, num_bytes: int) -> None:
        """Release the cache, as a failed allocation does after which the program continued. On an unlimited GPU do
        nothing: the run does not need this memory."""
        if not self._is_limited or self.timeline.first_oom is not None:
            return
        retries_before = self.allocator.statistics.num_alloc_retries
        try:
            self.allocator.free(self.allocator.malloc(num_bytes, self.stream, self.pool))
        except OutOfMemory:
            self._failed_retries += self.allocator.statistics.num_alloc_retries - retries_before

    def advance(self, end: int | None = None, *, stop_at_oom: bool = False, writes: bool = True) -> None:
        """Replay the events from the current one up to index `end` (exclusive; None: the end of the trace).

        `stop_at_oom` stops after the event of the first out-of-memory error. Without `writes` the timeline stays empty,
        which is a third faster, for callers that need only the allocator's state.
        """
        storages, refused, live = self.trace.storages, self.trace.refused, self.live
        blocks, addresses = self.timeline.blocks, self.timeline.addresses
        malloc, free, end_event = self.malloc, self.allocator.free, self.end_event
        alloc, freed, flushed, stream_set = EventKind.ALLOC, EventKind.FREE, EventKind.EMPTY_CACHE, EventKind.STREAM
        has_stream_uses, pending = self.trace.uses, self.allocator.pending
        begin, device = self.event, self.trace.device
        events = self.trace.events[begin:end]
        for time, (kind, ref) in enumerate(events, begin):
            has_grown = False
            if kind is alloc:
                storage = storages[ref]
                if storage.num_bytes and storage.device == device:
                    has_grown = True
                    self.event = time
                    if (refused and ref in refused) or ref in self.refused:
                        self._repeat_failure(storage.num_bytes)
                    elif (block := malloc(storage.num_bytes, self.stream, ref)) is not None:
                        live[ref] = block
                        self.allocated += block.size
                        if self.allocated > self.allocated_peak:
                            self.allocated_peak = self.allocated
                        if writes:
                            blocks[ref] = block.size
                            addresses[ref] = block.address
            elif kind is freed:
                if ref in live:
                    pending.now = time
                    block = live.pop(ref)
                    self.allocated -= block.size
                    free(block)
            elif kind is flushed:
                self.allocator.empty_cache()
            elif kind is stream_set:
                self.stream = ref
            elif kind is EventKind.POOL:
                self.pool = make_pool_id(ref)
                self.allocator.create_pool(self.pool)
            elif kind is EventKind.POOL_FREE:
                self.allocator.retire_pool(make_pool_id(ref))
            elif has_stream_uses:
                apply_stream_event(self.trace, self.allocator, live, time, Event(kind, ref))
            if writes:
                end_event(grew=has_grown)
                if stop_at_oom and self.timeline.first_oom is not None:
                    return
        self.event = begin + len(events)
