"""A recorded snapshot replayed: every allocation of the recording must come out at the address that it had.

The replay is fed what the program did (requests, frees, when frees completed, calls of empty_cache) and what the driver
answered (addresses, refusals). Everything between is the allocator's own, so equal addresses and an equal final layout
mean that it decided as torch did, every time.
"""

from __future__ import annotations

import contextlib
from array import array
from dataclasses import dataclass, field

from memprof.allocator.blocks import DEFAULT_POOL, Block, PoolId
from memprof.allocator.caching import UNKNOWN_SPACE, CachingAllocator
from memprof.allocator.config import AllocatorConfig, config_from_settings
from memprof.allocator.messages import OutOfMemory
from memprof.allocator.pools import SegmentLayout
from memprof.allocator.rebuild import State, restore, state_before
from memprof.allocator.rounding import MIN_BLOCK, SMALL_SIZE, round_size
from memprof.allocator.segments import whole_units
from memprof.allocator.streams import Completion
from memprof.trace.snapshot import Action, Snapshot, SnapshotEvent, SnapshotSegment

_OTHER_STREAM = -1
"""Which stream a late free waited for is not recorded."""

_FOREIGN = 1 << 56
"""Addresses for segments that the recording did not take."""

_DRIVER = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
_RETURNS = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
_ENDS = (Action.ALLOC, Action.OOM)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first point where the replay is not what was recorded."""

    event: int
    """Index in the device's trace; its length for the final layout."""
    problem: str
    reason: str
    """What in the file explains it; empty when nothing does: then the replay is wrong."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What became of the replay of one device's trace."""

    device: int
    allocations: int
    """In the whole trace."""
    identical_addresses: int
    """Allocations before the first difference."""
    final_layout_identical: bool
    first_difference: Difference | None
    live_at_start: int
    ambiguous_at_start: int
    """Live blocks of the beginning whose end is not recorded."""
    config: AllocatorConfig = field(repr=False, default_factory=AllocatorConfig)
    """The settings that were in force, as far as the file says."""
    start: State = field(repr=False, default_factory=State)
    """Segments and live blocks before the first event."""
    block_sizes: array[int] = field(repr=False, default_factory=lambda: array("q"))
    """Bytes of the block that each allocation was given, for the first `identical_addresses` of them."""
    flushes: tuple[int, ...] = field(repr=False, default=())
    """Events before which the program called empty_cache, or did what amounts to it."""

    @property
    def exact(self) -> bool:
        """Whether everything came out as recorded."""
        return self.final_layout_identical and self.identical_addresses == self.allocations


def replay_snapshot(snapshot: Snapshot, total_bytes: int | None = None) -> list[Recorded]:
    """Replay each device of `snapshot`, by device. A replay ends at its first difference.

    Args:
        snapshot: the recording.
        total_bytes: memory of the card, if it is known. No snapshot says it, and it decides one thing: how much address
            space an expandable segment has.

    Raises:
        UsageError: the snapshot's settings are ones that torch would refuse, or of another allocator.
    """
    return [_Replay(snapshot, device, total_bytes).run() for device in snapshot.devices]


class RecordedDriver:
    """Answers as the recorded driver did. `at` moves through the segment events."""

    def __init__(self, events: list[SnapshotEvent], large_segment: int) -> None:
        self.events = events
        self.large_segment = large_segment
        self.stream = 0
        self.small = False
        """What the request is for: set before each."""
        self.spaces: dict[int, int] = {}
        """Reservations by address, with their sizes."""
        self.at = 0
        self.problem: str | None = None
        self._foreign = _FOREIGN

    def malloc(self, size: int) -> int | None:
        """The address of the next recorded segment; None if the recorded driver refused."""
        event = self.next()
        if event is not None and event.action is Action.SEGMENT_ALLOC and event.size == size:
            self.at += 1
            return event.address
        if event is not None and (event.action in _RETURNS or event.action is Action.OOM):
            return None
        self.differs(f"a segment of {size} bytes was not taken")
        return self._new(size)

    def free(self, address: int, size: int) -> None:
        """Must be the next recorded one."""
        self._given_back(Action.SEGMENT_FREE, address, size)

    def reserve(self, size: int) -> int:
        """Where the next recorded mapping for this stream and pool is; it may be far off, if this one is refused."""
        for event in self.events[self.at :]:
            if (
                not self._taken(event.address)
                and event.action is Action.SEGMENT_MAP
                and event.stream == self.stream
                and (event.size % self.large_segment != 0) == self.small
            ):
                self.spaces[event.address] = size
                return event.address
        address = self._new(size)
        self.spaces[address] = size
        return address

    def unreserve(self, address: int, size: int) -> None:
        """Not recorded."""
        del self.spaces[address]

    def map(self, address: int, size: int) -> bool:
        """Whether the recorded driver had the memory."""
        event = self.next()
        if event is not None and event.action is Action.SEGMENT_MAP and (event.address, event.size) == (address, size):
            self.at += 1
            return True
        if event is not None and (event.action in _RETURNS or event.action is Action.OOM):
            return False
        self.differs(f"{size} bytes at {address:#x} were not mapped")
        return True

    def unmap(self, address: int, size: int) -> None:
        """Must be the next recorded one."""
        self._given_back(Action.SEGMENT_UNMAP, address, size)

    def memory_info(self) -> tuple[int, int]:
        """The card's memory is not recorded."""
        return 0, 0

    def _given_back(self, action: Action, address: int, size: int) -> None:
        event = self.next()
        if event is not None and (event.action, event.address, event.size) == (action, address, size):
            self.at += 1
        else:
            self.differs(f"{size} bytes at {address:#x} were not given back here")

    def next(self) -> SnapshotEvent | None:
        """The next event of the driver's, or of what ends a request."""
        while self.at < len(self.events) and self.events[self.at].action is Action.FREE_COMPLETED:
            self.at += 1
        return self.events[self.at] if self.at < len(self.events) else None

    def differs(self, problem: str) -> None:
        """Remember the first difference."""
        self.problem = self.problem or problem

    def _taken(self, address: int) -> bool:
        """Whether a reservation is there; of one whose size is not known, only its beginning says so."""
        return any(
            address == base or (size < UNKNOWN_SPACE and base <= address < base + size)
            for base, size in self.spaces.items()
        )

    def _new(self, size: int) -> int:
        self._foreign += size
        return self._foreign - size


class _Replay:
    """One device's trace."""

    def __init__(self, snapshot: Snapshot, device: int, total_bytes: int | None) -> None:
        self.device = device
        self.final = [segment for segment in snapshot.segments if segment.device == device]
        trace = snapshot.traces[device] if device < len(snapshot.traces) else []
        # Snapshots and annotations change nothing; their places in the trace are kept for messages.
        kept = [(i, e) for i, e in enumerate(trace) if e.action not in (Action.SNAPSHOT, Action.ANNOTATE)]
        self.places = [place for place, _ in kept]
        self.events = [event for _, event in kept]
        self.places.append(len(trace))
        config = config_from_settings(snapshot.settings)
        self.state: State = state_before(self.final, self.events, config)
        self.driver = RecordedDriver(self.events, config.large_segment_size)
        self.allocator = CachingAllocator(total_bytes, config, driver=self.driver, completion=Completion.AT_SYNC)
        if not snapshot.settings:
            maps = any(event.action is Action.SEGMENT_MAP for event in self.events)
            self.allocator.expandable |= maps or any(segment.expandable for segment in self.final)
        self.private = {segment.address: segment for segment in self.final if segment.pool_id != DEFAULT_POOL}
        self.live = restore(self.allocator, self.state)
        self.driver.spaces = {s.address: s.size for s in self.allocator.segment_store.live.values() if s.expandable}
        self.pending = {address: self.live[address] for address, block in self.state.live.items() if block.pending}
        self.first: Difference | None = None
        self.identical = 0
        self.sizes = array("q")
        self.flushes: list[int] = []

    def run(self) -> Recorded:
        index = 0
        while index < len(self.events) and self.first is None:
            event = self.events[index]
            if event.action is Action.FREE_REQUESTED:
                self.free(index, event)
            elif event.action in _ENDS:
                self.request(index, index)
            else:
                index = self.between(index)
                continue
            index += 1
        identical = self.first is None and _layout(self.final) == _own_layout(self.allocator.segments())
        if not identical:
            self.differs(len(self.events), "the final layout is another one")
        return Recorded(
            device=self.device,
            allocations=sum(event.action is Action.ALLOC for event in self.events),
            identical_addresses=self.identical,
            final_layout_identical=identical,
            first_difference=self.first,
            live_at_start=len(self.state.live),
            ambiguous_at_start=self.state.ambiguous,
            config=self.allocator.config,
            start=self.state,
            block_sizes=self.sizes,
            flushes=tuple(self.flushes),
        )

    def between(self, start: int) -> int:
        """Events from `start` that neither request nor free: the next request's own doing, or done before it.

        Returns:
            The index to go on at.
        """
        end = start
        while end < len(self.events) and self.events[end].action not in (*_ENDS, Action.FREE_REQUESTED):
            end += 1
        window = self.events[start:end]
        last = self.events[end] if end < len(self.events) else None
        own = last is not None and last.action in _ENDS and self.is_own(window, last)
        if own:
            self.request(start, end)
            return end + 1
        # Done before the request; what is taken from the driver after it may still be the request's own.
        taken = next((at for at in range(start, end) if self.events[at].action in _DRIVER), end)
        if taken > start:
            end = taken
        self.driver.at = start
        for event in self.events[start:end]:
            if event.action is Action.FREE_COMPLETED:
                self.complete(event.address)
            elif event.action in _RETURNS and self.driver.at <= start:
                # Nothing but empty_cache gives segments back outside a request.
                self.allocator.empty_cache()
                self.flushes.append(self.places[start])
        left = self.driver.next()
        if left is not None and self.driver.at < end:
            self.driver.differs(f"{left.action} of {left.size} bytes at {left.address:#x} does not happen")
        self.check_driver(start)
        return end

    def is_own(self, window: list[SnapshotEvent], last: SnapshotEvent) -> bool:
        """Whether the request `last` did what is in `window`: then it found no free block, and went to the driver."""
        actions = {event.action for event in window}
        if last.action is Action.ALLOC and not actions & {*_DRIVER}:
            return False
        size = max(round_size(last.size, self.allocator.divisions), MIN_BLOCK)
        if self.allocator.has_free_block(size, last.stream, self.pool_of(last)):
            return False
        if Action.FREE_COMPLETED in actions or not actions & {*_RETURNS}:
            return True
        # The same segments in the same order as empty_cache gives them back: then it was that, or as good as that.
        returned = [event.address for event in window if event.action in _RETURNS]
        first = window[0].action in _RETURNS
        return not (first and returned == _releasable(self.allocator))

    def request(self, start: int, index: int) -> None:
        """The allocation or refusal at `index`, which did what is recorded from `start` on."""
        event = self.events[index]
        self.driver.at = start
        self.driver.stream = event.stream
        self.driver.small = event.size <= SMALL_SIZE
        block: Block | None = None
        with contextlib.suppress(OutOfMemory):
            block = self.allocator.malloc(event.size, event.stream, self.pool_of(event))
        left = self.driver.next()
        if left is not None and self.driver.at < index:
            self.driver.differs(f"{left.action} of {left.size} bytes at {left.address:#x} does not happen")
        self.check_driver(index)
        for other in self.events[start:index]:
            if other.action is Action.FREE_COMPLETED:
                self.complete(other.address)
        if event.action is Action.OOM:
            if block is not None:
                self.differs(index, f"{event.size} bytes were refused, the replay finds {block.address:#x}")
        elif block is None:
            self.differs(index, f"{event.size} bytes were allocated, the replay runs out of memory")
        elif block.address != event.address:
            self.differs(index, f"{event.size} bytes at {event.address:#x}, the replay says {block.address:#x}")
        elif self.first is None:
            self.live[event.address] = block
            self.identical += 1
            self.sizes.append(block.size)

    def complete(self, address: int) -> None:
        block = self.pending.pop(address, None)
        if block is not None and block.events:  # else a wait within the allocator has found it done
            self.allocator.complete(block)

    def free(self, index: int, event: SnapshotEvent) -> None:
        block = self.live.pop(event.address, None)
        if block is None:
            self.differs(index, f"{event.address:#x} is freed, but nothing is there")
            return
        following = self.events[index + 1] if index + 1 < len(self.events) else None
        at_once = following is not None and (following.action, following.address) == (
            Action.FREE_COMPLETED,
            event.address,
        )
        if not at_once:
            self.allocator.record_stream(block, _OTHER_STREAM)
            self.pending[event.address] = block
        self.allocator.free(block)

    def check_driver(self, index: int) -> None:
        if self.driver.problem is not None:
            self.differs(index, self.driver.problem)

    def pool_of(self, event: SnapshotEvent) -> PoolId:
        if event.pool_id != DEFAULT_POOL:
            if event.pool_id not in self.allocator.pools:
                self.allocator.create_pool(event.pool_id)
            return event.pool_id
        for segment in self.private.values():  # before 2.9 events do not name their pool
            if segment.address <= event.address < segment.address + segment.size:
                return segment.pool_id
        return DEFAULT_POOL

    def differs(self, index: int, problem: str) -> None:
        if self.first is None:
            self.first = Difference(self.places[index], problem, self.reason())

    def reason(self) -> str:
        """What in the file explains a difference."""
        if self.state.contradictions:
            return f"the trace is not whole: {self.state.contradictions[0]}"
        if self.state.ambiguous:
            return f"where {self.state.ambiguous} blocks of the beginning end is not recorded"
        if any(run.expandable for run in self.state.ranges):
            return "the address space of the expandable segments that were there at the beginning is not recorded"
        return ""


def _releasable(allocator: CachingAllocator) -> list[int]:
    """Addresses of what empty_cache would give back now, in its order."""
    found: list[int] = []
    for sized in (allocator.default_pool.large, allocator.default_pool.small):
        unmapped: list[int] = []
        for block in sized.free_blocks():
            if block.segment.expandable:
                begin, end = whole_units(block)
                if begin < end:
                    unmapped.append(begin)
            elif block.prev is None and block.next is None:
                found.append(block.address)
        found += unmapped
    return found


_Blocks = tuple[tuple[int, int, str], ...]
_Layout = list[tuple[int, int, int, bool, bool, _Blocks]]


def _layout(segments: list[SnapshotSegment]) -> _Layout:
    return [
        (
            s.address,
            s.size,
            s.stream,
            s.is_small,
            s.expandable,
            tuple((b.address, b.size, b.state.value) for b in s.blocks),
        )
        for s in segments
    ]


def _own_layout(segments: list[SegmentLayout]) -> _Layout:
    return [
        (s.address, s.size, s.stream, s.is_small, s.expandable, tuple((b.address, b.size, b.state) for b in s.blocks))
        for s in segments
    ]
