"""Replay of a recorded snapshot: every allocation must get the recorded address.

The replay receives the program's actions (requests, frees, the completion of frees, calls of empty_cache) and the
driver's results (addresses, failures). All else the allocator decides: if all addresses and the final layout are equal,
the allocator made torch's decisions.
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
    ACTION_CODES,
    ALLOC,
    ANNOTATE,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_MAP,
    SNAPSHOT,
    EventColumns,
)
from memprof.trace.snapshot import DEFAULT_POOL, Action, PoolId, Snapshot, SnapshotEvent, SnapshotSegment

MAX_REPLAYS = 64  # replays of one trace at most

_REQUEST_ENDS = (Action.ALLOC, Action.OOM)
_STOP_ACTIONS = frozenset(ACTION_CODES[action] for action in (*_REQUEST_ENDS, Action.FREE_REQUESTED))


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """The first point where the replay differs from the recording."""

    device: int
    event: int  # Index in the device's trace; its length for the final layout.
    problem: str
    reason: str  # The cause in the file; empty if there is none: then the replay is wrong.


@dataclass(frozen=True, slots=True)
class SnapshotReplay:
    """The result of the replay of one device's trace."""

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

    `total_bytes` is the GPU's memory, if known: it is not in snapshots, and determines the address space of expandable
    segments. Raises UsageError: the settings are invalid, or select another allocator.
    """
    return [_replay_device(snapshot, device, total_bytes) for device in snapshot.devices]


def _replay_device(snapshot: Snapshot, device: int, total_bytes: int | None) -> SnapshotReplay:
    """Return the longest replay of one device. A recording may be ambiguous: after a difference, the replay is repeated
    with another choice.

    Memory that is released just before a request may be due to empty_cache, or to the request itself; delayed frees may
    have been polled, or waited for.
    """
    choices: dict[int, bool] = {}
    best: SnapshotReplay | None = None
    for _ in range(MAX_REPLAYS):
        replay = _DeviceReplay(snapshot, device, total_bytes, choices)
        result = replay.run()
        if best is None or result.exact or result.identical_addresses > best.identical_addresses:
            best = result
        untried = [index for index in replay.choices if index not in choices]
        if result.exact or not untried:
            break
        # Back to the last choice with an untried alternative; earlier forced choices stay.
        last_untried = untried[-1]
        choices = {index: is_own for index, is_own in choices.items() if index < last_untried}
        choices[last_untried] = not replay.choices[last_untried]
    assert best is not None
    return best


class _DeviceReplay:
    """One replay of one device's trace, with the choices in `forced` where the recording is ambiguous."""

    def __init__(self, snapshot: Snapshot, device: int, total_bytes: int | None, forced: dict[int, bool]) -> None:
        self.forced_choices = forced
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
        self.driver.live_segments = self.allocator.segment_store.live
        if not snapshot.settings:
            has_mappings = SEGMENT_MAP in self.events.actions
            self.allocator.expandable |= has_mappings or any(segment.expandable for segment in self.final)
        self.private_segments = [segment for segment in self.final if segment.pool_id != DEFAULT_POOL]
        self.first_difference: ReplayDifference | None = None
        self.block_sizes = array("q")
        self.flushes: list[int] = []
        self.live: dict[int, Block] = {}
        self.pending: dict[int, Block] = {}
        if self.state.contradictions:
            self.report(0, "the beginning cannot be rebuilt")
            return
        self.live = restore(self.allocator, self.state)
        self.driver.spaces = {s.address: s.size for s in self.allocator.segment_store.live.values() if s.expandable}
        self.pending = {address: self.live[address] for address, block in self.state.live.items() if block.pending}

    def run(self) -> SnapshotReplay:
        index, count = 0, len(self.events)
        while self.first_difference is None:
            index = self.replay_plain_requests(index)
            if index == count:
                break
            action = self.events.actions[index]
            if action == FREE_REQUESTED:
                index += 1 + self.free(index)
            elif action in _STOP_ACTIONS:
                self.replay_request(index, index)
                index += 1
            else:
                index = self.replay_driver_events(index)
        is_identical = self.first_difference is None and _layout(self.final) == _layout(self.allocator.segments())
        if not is_identical:
            self.report(len(self.events), "the final layout is another one")
        return SnapshotReplay(
            device=self.device,
            allocations=self.events.actions.count(ALLOC),
            identical_addresses=len(self.block_sizes),
            final_layout_identical=is_identical,
            first_difference=self.first_difference,
            config=self.allocator.config,
            start=self.state,
            block_sizes=self.block_sizes,
            flushes=tuple(self.flushes),
        )

    def replay_plain_requests(self, index: int) -> int:
        """Replay events from `index` on, while they are requests of the default pool or frees that complete at once.
        Return the index of the next event; stop after a difference."""
        events, driver, live, sizes = self.events, self.driver, self.live, self.block_sizes
        actions, addresses, requested, streams = events.actions, events.addresses, events.sizes, events.streams
        malloc, free, count = self.allocator.malloc, self.allocator.free, len(events)
        if self.private_segments or len(events.pool_ids) > 1:
            return index
        while index < count:
            action = actions[index]
            if action == ALLOC:
                driver.event_index = index
                address = addresses[index]
                try:
                    block = malloc(requested[index], streams[index])
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
                freed = live.pop(address, None)
                if freed is None:
                    return index
                free(freed)
                index += 2
            else:
                return index
        return index

    def replay_driver_events(self, start: int) -> int:
        """Replay the driver's events from `start` on, as part of the next request or as completed before it. Return the
        index of the next event."""
        end, actions = start, self.events.actions
        while end < len(actions) and actions[end] not in _STOP_ACTIONS:
            end += 1
        window = self.events[start:end]
        request = self.events[end] if end < len(self.events) else None
        is_own = request is not None and request.action in _REQUEST_ENDS and self.is_from_request(window, request)
        if (
            request is not None
            and request.action in _REQUEST_ENDS
            and any(event.action not in SEGMENT_ADDITIONS for event in window)
        ):
            is_own = self.choices[start] = self.forced_choices.get(start, is_own)
        if is_own:
            self.replay_request(start, end)
            return end + 1
        # Done before the request; segments taken afterwards may still belong to the request.
        first_addition = next((at for at in range(start, end) if self.events[at].action in SEGMENT_ADDITIONS), end)
        if first_addition > start:
            end = first_addition
        self.driver.event_index = start
        for event in self.events[start:end]:
            if event.action is Action.FREE_COMPLETED:
                self.complete_free(event.address)
            elif event.action in SEGMENT_REMOVALS and self.driver.event_index <= start:
                # Outside a request, only empty_cache releases segments.
                self.allocator.empty_cache()
                self.flushes.append(self.places[start])
        self.check_driver(start, end)
        return end

    def is_from_request(self, window: list[SnapshotEvent], request: SnapshotEvent) -> bool:
        """Return whether `request` caused the events in `window`: it needed memory from the driver."""
        actions = {event.action for event in window}
        if request.action is Action.ALLOC and not actions & {*SEGMENT_ADDITIONS} and not self.has_edge(window, request):
            return False
        size = max(round_size(request.size, self.allocator.divisions), MIN_BLOCK)
        if not self.allocator.needs_driver(size, request.stream, self.get_pool_id(request)):
            return False
        released_addresses = [event.address for event in window if event.action in SEGMENT_REMOVALS]
        if not released_addresses:
            # A request polls the frees of other streams at its begin, unless it had to wait for them.
            return Action.FREE_COMPLETED not in actions or request.action is Action.OOM
        # A request that is refused releases as empty_cache does, but oversize segments before all others.
        oversize_address = self.find_oversize_segment(size, request)
        return oversize_address is None or released_addresses[0] == oversize_address

    def has_edge(self, window: list[SnapshotEvent], request: SnapshotEvent) -> bool:
        """Return whether `request` got memory before an unmapped range in `window`, where a failed allocation looks."""
        unmapped = {event.address for event in window if event.action is Action.SEGMENT_UNMAP}
        pools = self.allocator.pools[self.get_pool_id(request)]
        owners = [p.streams[request.stream] for p in (pools.small, pools.large) if request.stream in p.streams]
        free = (block for owner in owners for block in owner.blocks.values() if block.segment.expandable)
        return any(block.address == request.address and find_mapping_units(block)[0] in unmapped for block in free)

    def find_oversize_segment(self, size: int, request: SnapshotEvent) -> int | None:
        """Return the address of the oversize segment that a failed allocation would release first, or None."""
        limit = self.allocator.max_split_size
        pools = self.allocator.pools[self.get_pool_id(request)]
        owner = (pools.small if size <= SMALL_SIZE else pools.large).get_stream_pool(request.stream)
        free_blocks = [owner.blocks[key] for key in owner.keys]
        oversize_blocks = [block for block in free_blocks if block.size >= limit and not block.segment.expandable]
        sufficient_blocks = [block for block in oversize_blocks if block.size >= size]
        if sufficient_blocks:
            return sufficient_blocks[0].address
        return oversize_blocks[-1].address if oversize_blocks else None

    def replay_request(self, start: int, index: int) -> None:
        """Replay the request at `index`, which caused the driver's events from `start` on."""
        event = self.events[index]
        self.driver.event_index = start
        self.driver.stream = event.stream
        self.driver.is_small = event.size <= SMALL_SIZE
        block: Block | None = None
        with contextlib.suppress(OutOfMemory):
            block = self.allocator.malloc(event.size, event.stream, self.get_pool_id(event))
        completed = [e.address for e in self.events[start:index] if e.action is Action.FREE_COMPLETED]
        self.check_answer(index, block, completed)

    def check_answer(self, index: int, block: Block | None, completed: Sequence[int] = ()) -> None:
        """Compare `block`, which the replay allocated, with the recorded result of event `index`; first complete the
        frees of the blocks at the addresses `completed`."""
        event = self.events[index]
        self.check_driver(index, index)
        for address in completed:
            self.complete_free(address)
        if event.action is Action.OOM:
            if block is not None:
                self.report(index, f"{event.size} bytes were refused, the replay finds {block.address:#x}")
        elif block is None:
            self.report(index, f"{event.size} bytes were allocated, the replay runs out of memory")
        elif block.address != event.address:
            self.report(index, f"{event.size} bytes at {event.address:#x}, the replay says {block.address:#x}")
        elif self.first_difference is None:
            self.live[event.address] = block
            self.block_sizes.append(block.size)

    def complete_free(self, address: int) -> None:
        block = self.pending.pop(address, None)
        if block is not None and block.events:  # else a wait within the allocator has completed it
            self.allocator.pending.complete(block)

    def free(self, index: int) -> int:
        """Free the block of the event at `index`; return how many of the following events belong to this free."""
        address = self.events.addresses[index]
        block = self.live.pop(address, None)
        if block is None:
            self.report(index, f"{address:#x} is freed, but nothing is there")
            return 0
        is_immediate = completes_at_once(self.events, index)
        if not is_immediate:
            self.allocator.record_stream(block, OTHER_STREAM)
            self.pending[address] = block
        self.allocator.free(block)
        return int(is_immediate)

    def check_driver(self, index: int, end: int) -> None:
        """Compare the driver's calls with those recorded before `end`; report a difference at `index`."""
        event = self.driver.find_next_event()
        if event is not None and self.driver.event_index < end:
            self.driver.report(f"{event.action} of {event.size} bytes at {event.address:#x} does not happen")
        if self.driver.problem is not None:
            self.report(index, self.driver.problem)

    def get_pool_id(self, event: SnapshotEvent) -> PoolId:
        pool_id = event.pool_id
        if pool_id == DEFAULT_POOL:  # before 2.9, events have no pool id
            around = (s for s in self.private_segments if s.address <= event.address < s.address + s.size)
            pool_id = next((segment.pool_id for segment in around), DEFAULT_POOL)
        self.allocator.create_pool(pool_id)
        return pool_id

    def report(self, index: int, problem: str) -> None:
        if self.first_difference is None:
            trace_index = self.places[index] if index < len(self.events) else self.end
            self.first_difference = ReplayDifference(self.device, trace_index, problem, self.find_reason(index))

    def find_reason(self, index: int) -> str:
        """Return why the file does not determine the replay of the event `index`; empty if there is no reason."""
        if self.state.contradictions:
            return f"the trace is not whole: {self.state.contradictions[0]}"
        if self.state.num_ambiguous:
            return f"where {self.state.num_ambiguous} blocks of the beginning end is not recorded"
        if any(run.expandable for run in self.state.ranges):
            return "the address space of the expandable segments that were there at the beginning is not recorded"
        if self.choices:
            return f"what gave memory back at event {self.places[max(self.choices)]} is not recorded"
        if index < len(self.events) and self.events[index].action is Action.OOM and self._may_have_waited(index):
            return "the frees that this request has waited for are not told apart from those before it"
        return ""

    def _may_have_waited(self, index: int) -> bool:
        """Return whether the request of event `index`, which was refused, may have waited for the frees right before
        it, or before the recording: it has not looked at these blocks."""
        removals = {ACTION_CODES[action] for action in SEGMENT_REMOVALS}
        while index > 0 and self.events.actions[index - 1] in removals:
            index -= 1
        return index == 0 or self.events.actions[index - 1] == FREE_COMPLETED


def _layout(segments: Sequence[SnapshotSegment]) -> list[tuple[object, ...]]:
    return [
        (s.address, s.size, s.stream, s.is_small, s.expandable, [(b.address, b.size, b.state) for b in s.blocks])
        for s in segments
    ]
