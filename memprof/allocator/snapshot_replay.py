"""Replay of a recorded snapshot: every allocation must get the recorded address.

The replay receives the program's actions (requests, frees, the completion of frees, calls of empty_cache) and the
driver's answers (addresses, refusals). The allocator decides the rest, so that equal addresses and an equal final
layout mean the same decisions as torch's, every time.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from memprof.allocator.blocks import Block
from memprof.allocator.caching import CachingAllocator
from memprof.allocator.config import AllocatorConfig, config_from_settings
from memprof.allocator.driver import SEGMENT_ADDITIONS, SEGMENT_REMOVALS, RecordedDriver
from memprof.allocator.initial_state import OTHER_STREAM, State, completes_at_once, rebuild_initial_state, restore
from memprof.allocator.messages import OutOfMemory
from memprof.allocator.rounding import MIN_BLOCK, SMALL_SIZE, round_size
from memprof.allocator.segments import find_mapping_units
from memprof.allocator.streams import Completion
from memprof.trace.columns import (
    ALLOC,
    ANNOTATE,
    CODES,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_MAP,
    SNAPSHOT,
    EventColumns,
)
from memprof.trace.snapshot import DEFAULT_POOL, Action, PoolId, Snapshot, SnapshotEvent, SnapshotSegment

MAX_REPLAYS = 64  # replays of one trace at most

_REQUEST_ENDS = (Action.ALLOC, Action.OOM)
_STOPS = frozenset(CODES[action] for action in (*_REQUEST_ENDS, Action.FREE_REQUESTED))


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """The first point where the replay differs from the recording."""

    device: int
    event: int  # Index in the device's trace; its length for the final layout.
    problem: str
    reason: str  # The cause in the file; empty if there is none: then the replay is wrong.


@dataclass(frozen=True, slots=True)
class SnapshotReplay:
    """The outcome of the replay of one device's trace."""

    device: int
    allocations: int  # in the whole trace
    identical_addresses: int  # allocations before the first difference
    final_layout_identical: bool
    first_difference: ReplayDifference | None
    config: AllocatorConfig = field(repr=False, default_factory=AllocatorConfig)  # as far as the file records it
    start: State = field(repr=False, default_factory=State)  # segments and live blocks before the first event
    block_sizes: array[int] = field(repr=False, default_factory=lambda: array("q"))  # in order of allocation
    flushes: tuple[int, ...] = field(repr=False, default=())  # events right after a call of empty_cache

    @property
    def exact(self) -> bool:
        """Return whether all addresses and the final layout are as recorded."""
        return self.final_layout_identical and self.identical_addresses == self.allocations


def replay_snapshot(snapshot: Snapshot, total_bytes: int | None = None) -> list[SnapshotReplay]:
    """Replay each device of `snapshot`, by device. A replay ends at its first difference.

    `total_bytes` is the GPU's memory, if known: snapshots do not contain it, and it decides how much address space an
    expandable segment has. Raises UsageError: settings that torch would reject, or of another allocator.
    """
    return [_replay_device(snapshot, device, total_bytes) for device in snapshot.devices]


def _replay_device(snapshot: Snapshot, device: int, total_bytes: int | None) -> SnapshotReplay:
    """Return the longest replay of one device. Where a recording is ambiguous, the other reading is tried on a
    difference.

    Memory that is released just before a request may be due to empty_cache, or to the request itself; delayed frees may
    have been polled, or waited for.
    """
    choices: dict[int, bool] = {}
    best: SnapshotReplay | None = None
    for _ in range(MAX_REPLAYS):
        replay = _Replay(snapshot, device, total_bytes, choices)
        found = replay.run()
        if best is None or found.exact or found.identical_addresses > best.identical_addresses:
            best = found
        untried = [place for place in replay.choices if place not in choices]
        if found.exact or not untried:
            break
        # Back to the last choice with an untried alternative; earlier forced choices stay.
        last = untried[-1]
        choices = {place: is_own for place, is_own in choices.items() if place < last}
        choices[last] = not replay.choices[last]
    assert best is not None
    return best


class _Replay:
    """One device's trace: the recording, the allocator, and the state of the replay."""

    def __init__(self, snapshot: Snapshot, device: int, total_bytes: int | None, forced: dict[int, bool]) -> None:
        self.forced = forced
        self.choices: dict[int, bool] = {}  # by event: whether its driver events were assigned to the next request
        self.device = device
        self.final = [segment for segment in snapshot.segments if segment.device == device]
        trace = EventColumns.of(snapshot.traces[device] if device < len(snapshot.traces) else [])
        self.end = len(trace)
        # Snapshots and annotations change nothing; `places` has the trace's indices, for messages.
        self.events, self.places = trace.without(SNAPSHOT, ANNOTATE)
        config = config_from_settings(snapshot.settings)
        self.state: State = rebuild_initial_state(self.final, self.events, config)
        self.driver = RecordedDriver(self.events, config.large_segment_size)
        self.allocator = CachingAllocator(
            total_bytes, config, driver=self.driver, completion=Completion.AT_SYNC, counts=False
        )
        self.driver.live = self.allocator.segment_store.live
        if not snapshot.settings:
            maps = SEGMENT_MAP in self.events.actions
            self.allocator.expandable |= maps or any(segment.expandable for segment in self.final)
        self.private = {segment.address: segment for segment in self.final if segment.pool_id != DEFAULT_POOL}
        self.first: ReplayDifference | None = None
        self.sizes = array("q")
        self.flushes: list[int] = []
        self.live: dict[int, Block] = {}
        self.pending: dict[int, Block] = {}
        if self.state.contradictions:
            self.differs(0, "the beginning cannot be rebuilt")
            return
        self.live = restore(self.allocator, self.state)
        self.driver.spaces = {s.address: s.size for s in self.allocator.segment_store.live.values() if s.expandable}
        self.pending = {address: self.live[address] for address, block in self.state.live.items() if block.pending}

    def run(self) -> SnapshotReplay:
        index, count = 0, len(self.events)
        while self.first is None:
            index = self.replay_plain_requests(index)
            if index == count:
                break
            action = self.events.actions[index]
            if action == FREE_REQUESTED:
                index += 1 + self.free(index)
            elif action in _STOPS:
                self.request(index, index)
                index += 1
            else:
                index = self.replay_driver_events(index)
        identical = self.first is None and _layout(self.final) == _layout(self.allocator.segments())
        if not identical:
            self.differs(len(self.events), "the final layout is another one")
        return SnapshotReplay(
            device=self.device,
            allocations=self.events.actions.count(ALLOC),
            identical_addresses=len(self.sizes),
            final_layout_identical=identical,
            first_difference=self.first,
            config=self.allocator.config,
            start=self.state,
            block_sizes=self.sizes,
            flushes=tuple(self.flushes),
        )

    def replay_plain_requests(self, index: int) -> int:
        """Replay requests of the default pool and frees that complete at once, nearly all of a recording, from `index`
        on. Return the index of the first other event, or of the event after the first difference."""
        events, driver, live, sizes = self.events, self.driver, self.live, self.sizes
        actions, addresses, requested, streams = events.actions, events.addresses, events.sizes, events.streams
        malloc, free, count = self.allocator.malloc, self.allocator.free, len(events)
        if self.private or len(events.pool_ids) > 1:
            return index
        while index < count:
            action = actions[index]
            if action == ALLOC:
                driver.at = index
                driver.stream = stream = streams[index]
                size, address = requested[index], addresses[index]
                driver.small = size <= SMALL_SIZE
                try:
                    block = malloc(size, stream)
                except OutOfMemory:
                    self.check_answer(index, None)
                    return index + 1
                index += 1
                if block.address != address or driver.problem is not None:
                    self.check_answer(index - 1, block)
                    return index
                live[address] = block
                sizes.append(block.size)
            elif action == FREE_REQUESTED:
                address, after = addresses[index], index + 1
                if after == count or addresses[after] != address or actions[after] != FREE_COMPLETED:
                    return index
                held = live.pop(address, None)
                if held is None:
                    return index
                free(held)
                index += 2
            else:
                return index
        return index

    def replay_driver_events(self, start: int) -> int:
        """Replay the driver's events from `start`, either as part of the next request or as done before it. Return the
        index of the next event."""
        end, actions = start, self.events.actions
        while end < len(actions) and actions[end] not in _STOPS:
            end += 1
        window = self.events[start:end]
        last = self.events[end] if end < len(self.events) else None
        is_own = last is not None and last.action in _REQUEST_ENDS and self.is_from_request(window, last)
        if (
            last is not None
            and last.action in _REQUEST_ENDS
            and any(event.action not in SEGMENT_ADDITIONS for event in window)
        ):
            is_own = self.choices[start] = self.forced.get(start, is_own)
        if is_own:
            self.request(start, end)
            return end + 1
        # Done before the request; segments taken afterwards may still belong to the request.
        taken = next((at for at in range(start, end) if self.events[at].action in SEGMENT_ADDITIONS), end)
        if taken > start:
            end = taken
        self.driver.at = start
        for event in self.events[start:end]:
            if event.action is Action.FREE_COMPLETED:
                self.complete(event.address)
            elif event.action in SEGMENT_REMOVALS and self.driver.at <= start:
                # Outside a request, only empty_cache releases segments.
                self.allocator.empty_cache()
                self.flushes.append(self.places[start])
        self.check_driver(start, end)
        return end

    def is_from_request(self, window: list[SnapshotEvent], last: SnapshotEvent) -> bool:
        """Return whether the request `last` caused the events in `window`: no free block served the request."""
        actions = {event.action for event in window}
        if last.action is Action.ALLOC and not actions & {*SEGMENT_ADDITIONS} and not self.has_kept_edge(window, last):
            return False
        size = max(round_size(last.size, self.allocator.divisions), MIN_BLOCK)
        if not self.allocator.needs_driver(size, last.stream, self.pool_of(last)):
            return False
        returned = [event.address for event in window if event.action in SEGMENT_REMOVALS]
        if not returned:
            # A request polls the frees of other streams at its begin, unless it had to wait for them.
            return Action.FREE_COMPLETED not in actions or last.action is Action.OOM
        # A request that is refused releases as empty_cache does, but oversize segments before all others.
        oversize_address = self.find_oversize_segment(size, last)
        return oversize_address is None or returned[0] == oversize_address

    def has_kept_edge(self, window: list[SnapshotEvent], last: SnapshotEvent) -> bool:
        """Return whether `last` got the memory before an unmapped part in `window`: a failed allocation looks there."""
        unmapped = {event.address for event in window if event.action is Action.SEGMENT_UNMAP}
        home = self.allocator.pools[self.pool_of(last)]
        owners = [sized.streams[last.stream] for sized in (home.small, home.large) if last.stream in sized.streams]
        free = (block for owner in owners for block in owner.blocks.values() if block.segment.expandable)
        return any(block.address == last.address and find_mapping_units(block)[0] in unmapped for block in free)

    def find_oversize_segment(self, size: int, last: SnapshotEvent) -> int | None:
        """Return the address of the oversize segment that a failed allocation would release first, or None."""
        limit = self.allocator.max_split_size
        home = self.allocator.pools[self.pool_of(last)]
        owner = (home.small if size <= SMALL_SIZE else home.large).get_stream_pool(last.stream)
        free_blocks = [owner.blocks[key] for key in owner.keys]
        large = [block for block in free_blocks if block.size >= limit and not block.segment.expandable]
        sufficient = [block for block in large if block.size >= size]
        if sufficient:
            return sufficient[0].address
        return large[-1].address if large else None

    def request(self, start: int, index: int) -> None:
        """Replay the request at `index`, which caused the events from `start` on."""
        event = self.events[index]
        self.driver.at = start
        self.driver.stream = event.stream
        self.driver.small = event.size <= SMALL_SIZE
        block: Block | None = None
        with contextlib.suppress(OutOfMemory):
            block = self.allocator.malloc(event.size, event.stream, self.pool_of(event))
        completed = [other.address for other in self.events[start:index] if other.action is Action.FREE_COMPLETED]
        self.check_answer(index, block, completed)

    def check_answer(self, index: int, block: Block | None, completed: Sequence[int] = ()) -> None:
        """Compare the allocator's answer to the request at `index`, and the frees that completed during the request."""
        event = self.events[index]
        self.check_driver(index, index)
        for address in completed:
            self.complete(address)
        if event.action is Action.OOM:
            if block is not None:
                self.differs(index, f"{event.size} bytes were refused, the replay finds {block.address:#x}")
        elif block is None:
            self.differs(index, f"{event.size} bytes were allocated, the replay runs out of memory")
        elif block.address != event.address:
            self.differs(index, f"{event.size} bytes at {event.address:#x}, the replay says {block.address:#x}")
        elif self.first is None:
            self.live[event.address] = block
            self.sizes.append(block.size)

    def complete(self, address: int) -> None:
        block = self.pending.pop(address, None)
        if block is not None and block.events:  # else a wait within the allocator has completed it
            self.allocator.pending.complete(block)

    def free(self, index: int) -> int:
        """Free the block of the event at `index`; return the number of later events that belong to this free."""
        address = self.events.addresses[index]
        block = self.live.pop(address, None)
        if block is None:
            self.differs(index, f"{address:#x} is freed, but nothing is there")
            return 0
        at_once = completes_at_once(self.events, index)
        if not at_once:
            self.allocator.record_stream(block, OTHER_STREAM)
            self.pending[address] = block
        self.allocator.free(block)
        return int(at_once)

    def check_driver(self, index: int, end: int) -> None:
        """Compare the driver's requests with those recorded before `end`; a difference is reported at `index`."""
        left = self.driver.next()
        if left is not None and self.driver.at < end:
            self.driver.differs(f"{left.action} of {left.size} bytes at {left.address:#x} does not happen")
        if self.driver.problem is not None:
            self.differs(index, self.driver.problem)

    def pool_of(self, event: SnapshotEvent) -> PoolId:
        if event.pool_id != DEFAULT_POOL:
            self.allocator.create_pool(event.pool_id)
            return event.pool_id
        for segment in self.private.values():  # before 2.9, events have no pool id
            if segment.address <= event.address < segment.address + segment.size:
                return segment.pool_id
        return DEFAULT_POOL

    def differs(self, index: int, problem: str) -> None:
        if self.first is None:
            place = self.places[index] if index < len(self.events) else self.end
            self.first = ReplayDifference(self.device, place, problem, self.reason())

    def reason(self) -> str:
        """Return the cause of a difference in the file; empty if there is none."""
        if self.state.contradictions:
            return f"the trace is not whole: {self.state.contradictions[0]}"
        if self.state.ambiguous:
            return f"where {self.state.ambiguous} blocks of the beginning end is not recorded"
        if any(run.expandable for run in self.state.ranges):
            return "the address space of the expandable segments that were there at the beginning is not recorded"
        if self.choices:
            return f"what gave memory back at event {self.places[max(self.choices)]} is not recorded"
        return ""


def _layout(segments: Sequence[SnapshotSegment]) -> list[tuple[object, ...]]:
    return [
        (s.address, s.size, s.stream, s.is_small, s.expandable, [(b.address, b.size, b.state) for b in s.blocks])
        for s in segments
    ]
