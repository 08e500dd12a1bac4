"""One device of a snapshot as a run: lifetimes of blocks, and requested, allocated and reserved bytes at each event."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from memprof.allocator import SnapshotReplay, replay_snapshot
from memprof.allocator.rounding import round_size
from memprof.ledger.categories import Category
from memprof.snapshots.origins import UNKNOWN, Origin, Part, find_origin, guess_category, list_module_calls
from memprof.trace import columns
from memprof.trace.snapshot import BlockState, Snapshot, SnapshotSegment, Stack

NEVER = 1 << 62  # as an event: after the end of the recording

BEFORE = -1  # as an event: before the recording began


@dataclass(slots=True)
class BlockLife:
    """A block from its allocation to its free; events are indices into the device's trace."""

    address: int
    requested: int
    size: int
    stream: int
    born: int
    stack: Stack
    origin: Origin
    category: Category = Category.UNATTRIBUTED
    freed: int = NEVER  # when the program freed it
    gone: int = NEVER  # when its memory could be used again: later than `freed` if another stream still worked on it


@dataclass(frozen=True, slots=True)
class Steps:
    """The events at which training steps begin."""

    begins: tuple[int, ...]  # events, rising; the last step may be cut short
    found_by: str  # how the steps were recognised, in words


@dataclass(slots=True)
class Recording:
    """The recording of one device: events, block lives, and memory after each event."""

    device: int
    events: columns.EventColumns
    final: list[SnapshotSegment]
    replay: SnapshotReplay
    lives: list[BlockLife] = field(default_factory=list)  # in order of birth; older blocks first, by address
    # After each event, bytes of blocks in use or waiting for other streams (torch's `requested_bytes`).
    requested: array[int] = field(default_factory=lambda: array("q"))
    # After each event, bytes of allocated blocks (`allocated_bytes`).
    allocated: array[int] = field(default_factory=lambda: array("q"))
    reserved: array[int] = field(default_factory=lambda: array("q"))  # after each event, of segments (`reserved_bytes`)
    start: tuple[int, int, int] = (0, 0, 0)  # requested, allocated and reserved before the first event
    unmatched_events: int = 0  # events that contradict earlier ones: parts of the recording are lost
    steps: Steps | None = None  # None if the steps were not recognised
    stages: list[tuple[str, int, int]] = field(default_factory=list)  # name, begin, end (exclusive); outer ones first
    exact_origins: bool = False  # whether modules and categories are known, not guessed: in a capture of memprof

    @property
    def end(self) -> int:
        """Return the index of the last event; BEFORE if the recording has no event."""
        return len(self.events) - 1

    def at(self, event: int) -> tuple[int, int, int]:
        """Return requested, allocated and reserved bytes after `event`."""
        if event < 0:
            return self.start
        return self.requested[event], self.allocated[event], self.reserved[event]

    def peak(self, column: str = "allocated") -> tuple[int, int]:
        """Return the peak in bytes of "requested", "allocated" or "reserved", and the first event with it."""
        bytes_by_event: array[int] = getattr(self, column)
        start_bytes = self.start[("requested", "allocated", "reserved").index(column)]
        peak_bytes = max(bytes_by_event, default=start_bytes)
        if peak_bytes < start_bytes or not bytes_by_event:
            return start_bytes, BEFORE
        return peak_bytes, bytes_by_event.index(peak_bytes)

    def alive(self, event: int) -> list[BlockLife]:
        """Return blocks in use after `event`, in order of birth."""
        return [life for life in self.lives if life.born <= event < life.gone]


def build_recordings(snapshot: Snapshot, origins: Sequence[Origin | None] | None = None) -> list[Recording]:
    """Return the recording of each device of `snapshot`; `origins` are the known origins of the first device's
    allocations. Raises UsageError: the settings in the snapshot cannot be replayed."""
    return [_RecordingBuilder(snapshot, replayed, origins).run() for replayed in replay_snapshot(snapshot)]


class _RecordingBuilder:
    """Builds the recording of one device in a single pass over its events."""

    def __init__(self, snapshot: Snapshot, replay: SnapshotReplay, origins: Sequence[Origin | None] | None) -> None:
        device = replay.device
        self.origins = origins
        self.known: dict[int, Origin] = {}  # by identity of the stack: hashing a hundred frames per block is slow
        self.interned: dict[Origin, Origin] = {}
        final = [segment for segment in snapshot.segments if segment.device == device]
        events = columns.EventColumns.of(snapshot.traces[device] if device < len(snapshot.traces) else [])
        self.found = Recording(device, events, final, replay, exact_origins=origins is not None)
        self.last = {
            block.address: block
            for segment in final
            for block in segment.blocks
            if block.state is not BlockState.INACTIVE
        }
        self.live: dict[int, BlockLife] = {}

    def run(self) -> Recording:
        recording = self.found
        requested = allocated = 0
        for address, block in sorted(recording.replay.start.live.items()):
            assert block.size is not None
            life = BlockLife(address, block.requested, block.size, 0, BEFORE, (), UNKNOWN)
            if block.pending:
                life.freed = BEFORE
            else:
                allocated += block.size
            requested += block.requested
            self.live[address] = life
            recording.lives.append(life)
        reserved = sum(segment.size for segment in recording.replay.start.ranges)
        recording.start = (requested, allocated, reserved)
        sizes, num_sizes = recording.replay.block_sizes, len(recording.replay.block_sizes)
        num_allocs = 0
        events, origins = recording.events, self.origins
        stack_origins: list[Origin | None] = [None] * len(events.known_stacks)
        live, lives = self.live, recording.lives
        for index, (action, address, size) in enumerate(
            zip(events.actions, events.addresses, events.sizes, strict=True)
        ):
            if action == columns.ALLOC:
                old_life = live.pop(address, None)
                if old_life is not None:  # its free was not recorded
                    recording.unmatched_events += 1
                    requested -= old_life.requested
                    allocated -= old_life.size if old_life.freed == NEVER else 0
                    old_life.freed = min(old_life.freed, index)
                    old_life.gone = index
                block_size = sizes[num_allocs] if num_allocs < num_sizes else round_size(size)
                stack_index = events.stacks[index]
                stack = events.known_stacks[stack_index]
                if origins is not None and num_allocs < len(origins):
                    origin = origins[num_allocs] or UNKNOWN
                else:
                    origin = stack_origins[stack_index] or self.find_origin(stack)
                    stack_origins[stack_index] = origin
                life = BlockLife(address, size, block_size, events.streams[index], index, stack, origin)
                num_allocs += 1
                live[address] = life
                lives.append(life)
                requested += size
                allocated += block_size
            elif action == columns.FREE_REQUESTED:
                block_life = live.get(address)
                if block_life is None or block_life.freed != NEVER:
                    recording.unmatched_events += 1
                else:
                    block_life.freed = index
                    allocated -= block_life.size
            elif action == columns.FREE_COMPLETED:
                block_life = live.pop(address, None)
                if block_life is None:
                    recording.unmatched_events += 1
                else:
                    if block_life.freed == NEVER:
                        block_life.freed = index
                        allocated -= block_life.size
                    block_life.gone = index
                    requested -= block_life.requested
            elif action in (columns.SEGMENT_ALLOC, columns.SEGMENT_MAP):
                reserved += size
            elif action in (columns.SEGMENT_FREE, columns.SEGMENT_UNMAP):
                reserved -= size
            recording.requested.append(requested)
            recording.allocated.append(allocated)
            recording.reserved.append(reserved)
        self.label_old_blocks()
        self.categorize()
        return recording

    def find_origin(self, stack: Stack) -> Origin:
        origin = self.known.get(id(stack))
        if origin is None:
            new_origin = find_origin(stack)
            origin = self.known[id(stack)] = self.interned.setdefault(new_origin, new_origin)
        return origin

    def label_old_blocks(self) -> None:
        """Set stack and origin of live blocks that were allocated before the trace, from the final segments."""
        streams = {block.address: segment.stream for segment in self.found.final for block in segment.blocks}
        for life in self.found.lives:
            if life.born != BEFORE:
                break
            life.stream = streams.get(life.address, 0)
            block = self.last.get(life.address)
            if block is not None and self.live.get(life.address) is life and block.frames:
                life.stack = block.frames
                life.origin = self.find_origin(block.frames)

    def categorize(self) -> None:
        recording = self.found
        if recording.exact_origins:
            for life in recording.lives:
                life.category = life.origin.category or Category.UNATTRIBUTED
            return
        parts, ends = _divide_into_parts(recording.lives, len(recording.events))
        _limit_to_calls(recording.lives, ends)
        oom_events = recording.events.find_indices(columns.OOM)
        for life in recording.lives:
            # Blocks whose life an out-of-memory error ended count as outliving.
            next_oom = bisect_left(oom_events, life.born)
            ended_by_oom = next_oom < len(oom_events) and oom_events[next_oom] < life.freed
            outlives = life.born == BEFORE or life.freed > ends[life.born] or ended_by_oom
            saved = outlives and BEFORE < life.freed < len(parts) and parts[life.freed] is Part.BACKWARD
            life.category = guess_category(
                life.origin, outlives=outlives, saved=saved, kept_bytes=life.requested if life.freed == NEVER else None
            )


def _divide_into_parts(lives: list[BlockLife], num_events: int) -> tuple[list[Part | None], array[int]]:
    """Return, for every event, the part of the step, and the last event of the part.

    A part ends at the first allocation of the next part; a backward at its own last allocation, since an optimizer may
    allocate nothing before the gradients are freed.
    """
    parts: list[Part | None] = [None] * num_events
    ends = array("q", [num_events]) * num_events
    next_event = num_events
    part: Part | None = None
    end = num_events
    for life in reversed(lives):
        if life.born == BEFORE:
            break
        if life.origin is not UNKNOWN and life.origin.part is not part:
            part = life.origin.part
            end = life.born if part is Part.BACKWARD else next_event
        parts[life.born : next_event] = [part] * (next_event - life.born)
        next_event = life.born
        ends[life.born] = end
    return parts, ends


def _limit_to_calls(lives: list[BlockLife], ends: array[int]) -> None:
    """Set the end of each allocation made inside a module call to at most the first allocation after the call."""
    open_calls: list[tuple[tuple[str, str], list[int]]] = []
    calls_by_origin: dict[int, list[tuple[str, str]]] = {}
    last_origin: Origin | None = None
    for life in lives:
        origin = life.origin
        if life.born == BEFORE or origin is UNKNOWN:
            continue
        if origin is last_origin:
            if open_calls:
                open_calls[-1][1].append(life.born)
            continue
        last_origin = origin
        calls = calls_by_origin.get(id(origin))
        if calls is None:
            calls = calls_by_origin[id(origin)] = list_module_calls(origin)
        num_common = 0
        while num_common < min(len(calls), len(open_calls)) and open_calls[num_common][0] == calls[num_common]:
            num_common += 1
        for _, births in open_calls[num_common:]:
            for birth in births:
                ends[birth] = min(ends[birth], life.born)
        open_calls[num_common:] = [(call, []) for call in calls[num_common:]]
        if open_calls:
            open_calls[-1][1].append(life.born)
