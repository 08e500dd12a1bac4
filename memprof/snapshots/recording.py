"""One device of a snapshot as a run: lifetimes of blocks, and requested, allocated and reserved bytes at each event."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from memprof.allocator import SnapshotReplay, replay_snapshot
from memprof.allocator.rounding import round_size
from memprof.ledger.categories import Category
from memprof.snapshots.origins import UNKNOWN, Origin, Part, calls_of, guess_category, origin_of
from memprof.trace import columns
from memprof.trace.snapshot import BlockState, Snapshot, SnapshotSegment, Stack

NEVER = 1 << 62  # as an event: after the end of the recording

BEFORE = -1  # as an event: before the recording began


@dataclass(slots=True)
class BlockLife:
    """A block from its allocation to its end. Events are indices of the device's trace."""

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
    """One device's recording, with the results of its replay and of its stacks."""

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
        """Return the largest value of a column, and the first event that reached it."""
        values: array[int] = getattr(self, column)
        before = self.start[("requested", "allocated", "reserved").index(column)]
        highest = max(values, default=before)
        if highest < before or not values:
            return before, BEFORE
        return highest, values.index(highest)

    def alive(self, event: int) -> list[BlockLife]:
        """Return blocks in use after `event`, in order of birth."""
        return [life for life in self.lives if life.born <= event < life.gone]


def recordings(snapshot: Snapshot, origins: Sequence[Origin | None] | None = None) -> list[Recording]:
    """Return the recording of each device of `snapshot`; `origins` are the known origins of the first device's
    allocations. Raises UsageError: the settings in the snapshot cannot be replayed."""
    return [_RecordingBuilder(snapshot, replayed, origins).run() for replayed in replay_snapshot(snapshot)]


class _RecordingBuilder:
    """A single pass over the events of one device."""

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
        found = self.found
        requested = allocated = 0
        for address, block in sorted(found.replay.start.live.items()):
            size = round_size(block.requested) if block.size is None else block.size
            life = BlockLife(address, block.requested, size, 0, BEFORE, (), UNKNOWN)
            if block.pending:
                life.freed = BEFORE
            else:
                allocated += size
            requested += block.requested
            self.live[address] = life
            found.lives.append(life)
        reserved = sum(run.size for run in found.replay.start.ranges)
        found.start = (requested, allocated, reserved)
        sizes, num_sizes = found.replay.block_sizes, len(found.replay.block_sizes)
        number = 0
        events, origins = found.events, self.origins
        stack_origins: list[Origin | None] = [None] * len(events.known_stacks)
        live, lives = self.live, found.lives
        for index, (action, address, size) in enumerate(
            zip(events.actions, events.addresses, events.sizes, strict=True)
        ):
            if action == columns.ALLOC:
                old = live.pop(address, None)
                if old is not None:  # its free was not recorded
                    found.unmatched_events += 1
                    requested -= old.requested
                    allocated -= old.size if old.freed == NEVER else 0
                    old.freed = min(old.freed, index)
                    old.gone = index
                block_size = sizes[number] if number < num_sizes else round_size(size)
                stack_number = events.stacks[index]
                stack = events.known_stacks[stack_number]
                if origins is not None and number < len(origins):
                    origin = origins[number] or UNKNOWN
                else:
                    origin = stack_origins[stack_number] or self.find_origin(stack)
                    stack_origins[stack_number] = origin
                life = BlockLife(address, size, block_size, events.streams[index], index, stack, origin)
                number += 1
                live[address] = life
                lives.append(life)
                requested += size
                allocated += block_size
            elif action == columns.FREE_REQUESTED:
                block_life = live.get(address)
                if block_life is None or block_life.freed != NEVER:
                    found.unmatched_events += 1
                else:
                    block_life.freed = index
                    allocated -= block_life.size
            elif action == columns.FREE_COMPLETED:
                block_life = live.pop(address, None)
                if block_life is None:
                    found.unmatched_events += 1
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
            found.requested.append(requested)
            found.allocated.append(allocated)
            found.reserved.append(reserved)
        self.label_old_blocks()
        self.categorize()
        return found

    def find_origin(self, stack: Stack) -> Origin:
        known = self.known.get(id(stack))
        if known is None:
            made = origin_of(stack)
            known = self.known[id(stack)] = self.interned.setdefault(made, made)
        return known

    def label_old_blocks(self) -> None:
        """Set stack and origin of blocks that are older than the trace and still live, from the final segments."""
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
        found = self.found
        if found.exact_origins:
            for life in found.lives:
                life.category = life.origin.category or Category.UNATTRIBUTED
            return
        parts, ends = _divide_into_parts(found.lives, len(found.events))
        _lower_call_ends(found.lives, ends)
        refused = found.events.find_indices(columns.OOM)
        for life in found.lives:
            # Blocks whose life an out-of-memory error ended count as outliving.
            following = bisect_left(refused, life.born)
            cut = following < len(refused) and refused[following] < life.freed
            outlives = life.born == BEFORE or life.freed > ends[life.born] or cut
            saved = outlives and BEFORE < life.freed < len(parts) and parts[life.freed] is Part.BACKWARD
            life.category = guess_category(
                life.origin, outlives=outlives, saved=saved, kept_bytes=life.requested if life.freed == NEVER else None
            )


def _divide_into_parts(lives: list[BlockLife], count: int) -> tuple[list[Part | None], array[int]]:
    """Return, for every event, the part of the step at the event, and the event that an outliving block is freed after.

    That event is the first allocation of the next part; for a backward pass its own last allocation, as an optimizer
    may allocate nothing before the gradients are freed.
    """
    parts: list[Part | None] = [None] * count
    ends = array("q", [count]) * count
    following = count
    part: Part | None = None
    end = count
    for life in reversed(lives):
        if life.born == BEFORE:
            break
        if life.origin is not UNKNOWN and life.origin.part is not part:
            part = life.origin.part
            end = life.born if part is Part.BACKWARD else following
        parts[life.born : following] = [part] * (following - life.born)
        following = life.born
        ends[life.born] = end
    return parts, ends


def _lower_call_ends(lives: list[BlockLife], ends: array[int]) -> None:
    """Lower `ends` to the next allocation outside the module call around each event."""
    running: list[tuple[tuple[str, str], list[int]]] = []
    known: dict[int, list[tuple[str, str]]] = {}
    last: Origin | None = None
    for life in lives:
        origin = life.origin
        if life.born == BEFORE or origin is UNKNOWN:
            continue
        if origin is last:
            if running:
                running[-1][1].append(life.born)
            continue
        last = origin
        calls = known.get(id(origin))
        if calls is None:
            calls = known[id(origin)] = calls_of(origin)
        same = 0
        while same < min(len(calls), len(running)) and running[same][0] == calls[same]:
            same += 1
        for _, births in running[same:]:
            for birth in births:
                ends[birth] = min(ends[birth], life.born)
        running[same:] = [(call, []) for call in calls[same:]]
        if running:
            running[-1][1].append(life.born)
