"""The events of one device as columns: 42 bytes per event, where a record with its numbers takes 300.

A column is an `array`: a loop over a column creates only the numbers that it visits. Stacks and pools have numbers, so
that a property of a stack is computed once for all events with that stack.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import NamedTuple, overload

from memprof.trace.snapshot import Action, SnapshotEvent, Stack

ACTIONS = tuple(Action)
CODES = {action: code for code, action in enumerate(ACTIONS)}
ALLOC, FREE_REQUESTED, FREE_COMPLETED = CODES[Action.ALLOC], CODES[Action.FREE_REQUESTED], CODES[Action.FREE_COMPLETED]
SEGMENT_ALLOC, SEGMENT_MAP = CODES[Action.SEGMENT_ALLOC], CODES[Action.SEGMENT_MAP]
SEGMENT_FREE, SEGMENT_UNMAP = CODES[Action.SEGMENT_FREE], CODES[Action.SEGMENT_UNMAP]
# Codes of actions in the column `actions`.
OOM, SNAPSHOT, ANNOTATE = CODES[Action.OOM], CODES[Action.SNAPSHOT], CODES[Action.ANNOTATE]

NO_TIME = -1
COLUMNS = ("actions", "addresses", "sizes", "streams", "times", "pools", "stacks")


class EventColumns(Sequence[SnapshotEvent]):
    """Events in order. As a sequence, the columns create a record for each item that is accessed."""

    def __init__(self) -> None:
        self.actions = array("B")  # places in ACTIONS
        self.addresses = array("Q")
        self.sizes = array("Q")  # bytes
        self.streams = array("Q")
        self.times = array("q")  # microseconds, or NO_TIME
        self.pools = array("I")  # places in `pool_ids`; 0 is the default pool
        self.stacks = array("I")  # places in `known_stacks`; 0 is the empty stack
        self.pool_ids: list[tuple[int, int]] = [(0, 0)]
        self.known_stacks: list[Stack] = [()]
        self._stack_ids: dict[int, int] = {}
        self._pool_numbers = {(0, 0): 0}

    @classmethod
    def of(cls, events: Iterable[SnapshotEvent]) -> EventColumns:
        """Return `events` as columns; return `events` itself if it is an `EventColumns`."""
        if isinstance(events, EventColumns):
            return events
        found = cls()
        for event in events:
            found.append(event)
        return found

    @classmethod
    def sharing(cls, other: EventColumns) -> EventColumns:
        """Return columns without events that use the same tables of stacks and pools as `other`, now and later."""
        found = cls()
        found.pool_ids, found._pool_numbers = other.pool_ids, other._pool_numbers
        found.known_stacks, found._stack_ids = other.known_stacks, other._stack_ids
        return found

    def extend(self, rows: EventColumns, begin: int, end: int) -> None:
        """Append the events from `begin` to `end` of `rows`, which has the same numbers of stacks and pools."""
        for name in COLUMNS:
            getattr(self, name).extend(getattr(rows, name)[begin:end])

    def append(self, event: SnapshotEvent) -> None:
        """Append an event. Raises OverflowError: a number of the event has more than 64 bits."""
        self.addresses.append(event.address)
        self.sizes.append(event.size)
        self.streams.append(event.stream)
        self.times.append(NO_TIME if event.time_us is None else event.time_us)
        self.pools.append(self.pool(event.pool_id))
        self.stacks.append(self.stack(event.frames))
        self.actions.append(CODES[event.action])

    def pool(self, pool_id: tuple[int, int]) -> int:
        """Return the number of a pool."""
        known = self._pool_numbers.get(pool_id)
        if known is None:
            known = self._pool_numbers[pool_id] = len(self.pool_ids)
            self.pool_ids.append(pool_id)
        return known

    def stack(self, frames: Stack) -> int:
        """Return the number of a stack, which is found by identity: readers create equal stacks once."""
        if not frames:
            return 0
        known = self._stack_ids.get(id(frames))
        if known is None:
            known = self._stack_ids[id(frames)] = len(self.known_stacks)
            self.known_stacks.append(frames)
        return known

    def without(self, *codes: int) -> tuple[EventColumns, Sequence[int]]:
        """Return the events whose action is none of `codes`, and the indices of these events in this sequence."""
        places: Sequence[int] = range(len(self))
        if not any(code in self.actions for code in codes):
            return self, places
        places = [at for at, action in enumerate(self.actions) if action not in codes]
        found = EventColumns.sharing(self)
        for name in COLUMNS:
            getattr(found, name).extend(map(getattr(self, name).__getitem__, places))
        return found, places

    def places(self, *codes: int) -> list[int]:
        """Return the indices of the events with these actions, in order."""
        found: list[int] = []
        actions = self.actions.tobytes()
        for code in codes:
            at = actions.find(code)
            while at >= 0:
                found.append(at)
                at = actions.find(code, at + 1)
        return sorted(found) if len(codes) > 1 else found

    def __len__(self) -> int:
        return len(self.actions)

    @overload
    def __getitem__(self, index: int) -> SnapshotEvent: ...

    @overload
    def __getitem__(self, index: slice) -> list[SnapshotEvent]: ...

    def __getitem__(self, index: int | slice) -> SnapshotEvent | list[SnapshotEvent]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        return self._record(
            self.actions[index], self.addresses[index], self.sizes[index], self.streams[index], self.pools[index],
            self.times[index], self.stacks[index],
        )  # fmt: skip

    def __iter__(self) -> Iterator[SnapshotEvent]:
        columns = (self.actions, self.addresses, self.sizes, self.streams, self.pools, self.times, self.stacks)
        return starmap(self._record, zip(*columns, strict=True))

    def _record(
        self, action: int, address: int, size: int, stream: int, pool: int, time: int, stack: int
    ) -> SnapshotEvent:
        time_us = None if time == NO_TIME else time
        return SnapshotEvent(
            ACTIONS[action], address, size, stream, self.pool_ids[pool], time_us, self.known_stacks[stack]
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"EventColumns({len(self)} events, {len(self.known_stacks)} stacks)"


@dataclass(frozen=True, slots=True)
class CutRange:
    """A placeholder in a list for events that were cut out: a range of rows of `CutEvents`."""

    first: int
    count: int


class CutEvents(NamedTuple):
    """Events that were cut out of a file: `rows.stacks` are indices of `lists`, and 0 means no frames."""

    rows: EventColumns
    lists: list[object]  # as they were unpickled
