"""A recorded snapshot replayed: every allocation of the recording must come out at the address that it had.

The replay is fed what the program did (requests, frees, when frees completed, calls of empty_cache) and what the driver
answered (addresses, refusals). Everything between is the allocator's own, so equal addresses and an equal final layout
mean that it decided as torch did, every time.
"""

from __future__ import annotations

from dataclasses import dataclass

from memprof.allocator.blocks import DEFAULT_POOL, PoolId
from memprof.allocator.caching import CachingAllocator
from memprof.allocator.config import config_from_settings
from memprof.allocator.messages import OutOfMemory
from memprof.allocator.pools import SegmentLayout
from memprof.allocator.rebuild import State, restore, state_before
from memprof.allocator.streams import Completion
from memprof.trace.snapshot import Action, Snapshot, SnapshotEvent, SnapshotSegment

_OTHER_STREAM = -1
"""Which stream a late free waited for is not recorded."""

_FOREIGN = 1 << 56
"""Addresses for segments that the recording did not take."""

_DRIVER = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
_RETURNS = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)


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
    identical_addresses: int
    final_layout_identical: bool
    first_difference: Difference | None
    live_at_start: int
    ambiguous_at_start: int
    """Live blocks of the beginning whose end is not recorded."""

    @property
    def exact(self) -> bool:
        """Whether everything came out as recorded."""
        return self.final_layout_identical and self.identical_addresses == self.allocations


def replay_snapshot(snapshot: Snapshot) -> list[Recorded]:
    """Replay each device of `snapshot`, by device.

    Raises:
        UsageError: the snapshot's settings are ones that torch would refuse, or of another allocator.
    """
    return [_Replay(snapshot, device).run() for device in snapshot.devices]


class RecordedDriver:
    """Answers as the recorded driver did. `at` moves through the segment events."""

    def __init__(self, events: list[SnapshotEvent]) -> None:
        self.events = events
        self.at = 0
        self.problem: str | None = None
        self._foreign = _FOREIGN

    def malloc(self, size: int) -> int | None:
        """The address of the next recorded segment; None if the recorded driver refused."""
        event = self._next()
        if event is not None and event.action is Action.SEGMENT_ALLOC and event.size == size:
            self.at += 1
            return event.address
        if event is not None and (event.action in _RETURNS or event.action is Action.OOM):
            return None
        self._differs(f"a segment of {size} bytes was not taken")
        return self._new(size)

    def free(self, address: int, size: int) -> None:
        """Must be the next recorded one."""
        self._given_back(Action.SEGMENT_FREE, address, size)

    def reserve(self, size: int) -> int:
        """Where the next recorded mapping is."""
        event = self._next()
        if event is not None and event.action is Action.SEGMENT_MAP:
            return event.address
        return self._new(size)

    def unreserve(self, address: int, size: int) -> None:
        """Not recorded."""

    def map(self, address: int, size: int) -> bool:
        """Whether the recorded driver had the memory."""
        event = self._next()
        if event is not None and event.action is Action.SEGMENT_MAP and (event.address, event.size) == (address, size):
            self.at += 1
            return True
        if event is not None and (event.action in _RETURNS or event.action is Action.OOM):
            return False
        self._differs(f"{size} bytes at {address:#x} were not mapped")
        return True

    def unmap(self, address: int, size: int) -> None:
        """Must be the next recorded one."""
        self._given_back(Action.SEGMENT_UNMAP, address, size)

    def memory_info(self) -> tuple[int, int]:
        """The card's memory is not recorded."""
        return 0, 0

    def _given_back(self, action: Action, address: int, size: int) -> None:
        event = self._next()
        if event is not None and (event.action, event.address, event.size) == (action, address, size):
            self.at += 1
        else:
            self._differs(f"{size} bytes at {address:#x} were not given back here")

    def _next(self) -> SnapshotEvent | None:
        return self.events[self.at] if self.at < len(self.events) else None

    def _differs(self, problem: str) -> None:
        self.problem = self.problem or problem

    def _new(self, size: int) -> int:
        self._foreign += size
        return self._foreign - size


class _Replay:
    """One device's trace."""

    def __init__(self, snapshot: Snapshot, device: int) -> None:
        self.device = device
        self.final = [segment for segment in snapshot.segments if segment.device == device]
        trace = snapshot.traces[device] if device < len(snapshot.traces) else []
        # Snapshots and annotations change nothing; their places in the trace are kept for messages.
        kept = [(i, e) for i, e in enumerate(trace) if e.action not in (Action.SNAPSHOT, Action.ANNOTATE)]
        self.places = [place for place, _ in kept]
        self.events = [event for _, event in kept]
        self.places.append(len(trace))
        config = config_from_settings(snapshot.settings)
        self.state: State = state_before(self.final, self.events)
        self.driver = RecordedDriver(self.events)
        self.allocator = CachingAllocator(None, config, driver=self.driver, completion=Completion.AT_SYNC)
        if not snapshot.settings:
            maps = any(event.action is Action.SEGMENT_MAP for event in self.events)
            self.allocator.expandable |= maps or any(segment.expandable for segment in self.final)
        self.private = {segment.address: segment for segment in self.final if segment.pool_id != DEFAULT_POOL}
        self.live = restore(self.allocator, self.state)
        self.pending = {address: self.live[address] for address, block in self.state.live.items() if block.pending}
        self.first: Difference | None = None
        self.allocations = self.identical = 0

    def run(self) -> Recorded:
        for index, event in enumerate(self.events):
            match event.action:
                case Action.ALLOC:
                    self.alloc(index, event)
                case Action.OOM:
                    self.oom(index, event)
                case Action.FREE_REQUESTED:
                    self.free(index, event)
                case Action.FREE_COMPLETED:
                    block = self.pending.pop(event.address, None)
                    if block is not None:
                        self.allocator.complete(block)
                case Action.SEGMENT_FREE | Action.SEGMENT_UNMAP:
                    self.give_back(index)
        identical = _layout(self.final) == _own_layout(self.allocator.segments())
        if not identical:
            self.differs(len(self.events), "the final layout is another one")
        return Recorded(
            device=self.device,
            allocations=self.allocations,
            identical_addresses=self.identical,
            final_layout_identical=identical,
            first_difference=self.first,
            live_at_start=len(self.state.live),
            ambiguous_at_start=self.state.ambiguous,
        )

    def alloc(self, index: int, event: SnapshotEvent) -> None:
        self.allocations += 1
        self.seek(index)
        try:
            block = self.allocator.malloc(event.size, event.stream, self.pool_of(event))
        except OutOfMemory:
            self.differs(index, f"{event.size} bytes were allocated, the replay runs out of memory")
            return
        self.check_driver(index)
        self.live[event.address] = block
        if block.address == event.address:
            self.identical += 1
        else:
            self.differs(index, f"{event.size} bytes at {event.address:#x}, the replay says {block.address:#x}")

    def oom(self, index: int, event: SnapshotEvent) -> None:
        self.seek(index)
        try:
            block = self.allocator.malloc(event.size, event.stream, self.pool_of(event))
        except OutOfMemory:
            self.check_driver(index)
        else:
            self.differs(index, f"{event.size} bytes were refused, the replay finds {block.address:#x}")
            self.allocator.free(block)
        self.driver.at = index + 1

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

    def give_back(self, index: int) -> None:
        """Segments go back: by empty_cache if that gives just these; else the next request gives them back itself."""
        if self.driver.at > index:
            return  # done with an earlier one of the same call
        self.seek(index)
        end = index
        while end < len(self.events) and self.events[end].action in _RETURNS:
            end += 1
        later = self.events[end].action if end < len(self.events) else None
        would = _releasable(self.allocator)
        recorded = {event.address for event in self.events[index:end]}
        if recorded <= would or later not in (*_DRIVER, Action.ALLOC, Action.OOM):
            self.allocator.empty_cache()
            self.check_driver(end)

    def seek(self, index: int) -> None:
        """Let the driver go on at the segment events just before `index`."""
        start = index
        while start > self.driver.at and self.events[start - 1].action in (*_DRIVER, *_RETURNS):
            start -= 1
        self.driver.at = start

    def check_driver(self, index: int) -> None:
        if self.driver.problem is not None:
            self.differs(index, self.driver.problem)
            self.driver.problem = None
        elif self.driver.at < index:
            left = self.events[self.driver.at]
            self.differs(index, f"{left.action} of {left.size} bytes at {left.address:#x} does not happen")
        self.driver.at = index

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
        return ""


def _releasable(allocator: CachingAllocator) -> set[int]:
    """Addresses of what empty_cache would give back now."""
    found: set[int] = set()
    for sized in (allocator.default_pool.large, allocator.default_pool.small):
        for block in sized.free_blocks():
            if block.segment.expandable:
                base, unit = block.segment.address, block.segment.unit
                found.add(base + -(-(block.address - base) // unit) * unit)
            elif block.prev is None and block.next is None:
                found.add(block.address)
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
