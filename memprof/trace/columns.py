"""The events of one device as columns, which take 42 bytes per event; a `SnapshotEvent` takes 300.

A column is an `array`. Stacks and pools are stored once, and columns have their indices, so that a property of a stack
is computed once for all events with that stack.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import NamedTuple, overload

from memprof.trace.snapshot import Action, SnapshotEvent, Stack

ACTIONS = tuple(Action)
ACTION_CODES = {action: code for code, action in enumerate(ACTIONS)}
# Codes of actions in the column `actions`.
ALLOC, FREE_REQUESTED = ACTION_CODES[Action.ALLOC], ACTION_CODES[Action.FREE_REQUESTED]
FREE_COMPLETED, SEGMENT_ALLOC = ACTION_CODES[Action.FREE_COMPLETED], ACTION_CODES[Action.SEGMENT_ALLOC]
SEGMENT_MAP, SEGMENT_FREE = ACTION_CODES[Action.SEGMENT_MAP], ACTION_CODES[Action.SEGMENT_FREE]
SEGMENT_UNMAP, OOM = ACTION_CODES[Action.SEGMENT_UNMAP], ACTION_CODES[Action.OOM]
SNAPSHOT, ANNOTATE = ACTION_CODES[Action.SNAPSHOT], ACTION_CODES[Action.ANNOTATE]

NO_TIME = -1
COLUMNS = ("actions", "addresses", "sizes", "streams", "times", "pools", "stacks")


class EventColumns(Sequence[SnapshotEvent]):
    """The events of one device, in order. As a sequence, it creates a `SnapshotEvent` for each item accessed."""

    def __init__(self) -> None:
        self.actions = array("B")  # indices in ACTIONS
        self.addresses = array("Q")
        self.sizes = array("Q")  # bytes
        self.streams = array("Q")
        self.times = array("q")  # microseconds, or NO_TIME
        self.pools = array("I")  # indices in `pool_ids`; 0 is the default pool
        self.stacks = array("I")  # indices in `known_stacks`; 0 is the empty stack
        self.pool_ids: list[tuple[int, int]] = [(0, 0)]
        self.known_stacks: list[Stack] = [()]
        self._stack_indices: dict[int, int] = {}
        self._pool_indices = {(0, 0): 0}

    @classmethod
    def of(cls, events: Iterable[SnapshotEvent]) -> EventColumns:
        """Return `events` as columns; if it is an `EventColumns`, return it unchanged."""
        if isinstance(events, EventColumns):
            return events
        columns = cls()
        for event in events:
            columns.append(event)
        return columns

    @classmethod
    def create_sharing(cls, other: EventColumns) -> EventColumns:
        """Return empty columns that share the tables of stacks and pools with `other`."""
        columns = cls()
        columns.pool_ids, columns._pool_indices = other.pool_ids, other._pool_indices
        columns.known_stacks, columns._stack_indices = other.known_stacks, other._stack_indices
        return columns

    def extend(self, source: EventColumns, begin: int, end: int) -> None:
        """Append `source[begin:end]`; stack and pool indices of `source` must be those of this sequence."""
        for name in COLUMNS:
            getattr(self, name).extend(getattr(source, name)[begin:end])

    def append(self, event: SnapshotEvent) -> None:
        """Append `event`. Raises OverflowError: an integer in it has more than 64 bits."""
        self.addresses.append(event.address)
        self.sizes.append(event.size)
        self.streams.append(event.stream)
        self.times.append(NO_TIME if event.time_us is None else event.time_us)
        self.pools.append(self.pool(event.pool_id))
        self.stacks.append(self.stack(event.frames))
        self.actions.append(ACTION_CODES[event.action])

    def pool(self, pool_id: tuple[int, int]) -> int:
        """Return the index of a pool in `pool_ids`; a new pool is added."""
        index = self._pool_indices.get(pool_id)
        if index is None:
            index = self._pool_indices[pool_id] = len(self.pool_ids)
            self.pool_ids.append(pool_id)
        return index

    def stack(self, frames: Stack) -> int:
        """Return the index of a stack in `known_stacks`, compared by identity; a new stack is added."""
        if not frames:
            return 0
        index = self._stack_indices.get(id(frames))
        if index is None:
            index = self._stack_indices[id(frames)] = len(self.known_stacks)
            self.known_stacks.append(frames)
        return index

    def without(self, *codes: int) -> tuple[EventColumns, Sequence[int]]:
        """Return the events whose action is not in `codes`, and their indices in this sequence."""
        indices: Sequence[int] = range(len(self))
        if not any(code in self.actions for code in codes):
            return self, indices
        indices = [index for index, action in enumerate(self.actions) if action not in codes]
        columns = EventColumns.create_sharing(self)
        for name in COLUMNS:
            getattr(columns, name).extend(map(getattr(self, name).__getitem__, indices))
        return columns, indices

    def find_indices(self, *codes: int) -> list[int]:
        """Return the indices of the events with an action in `codes`, in order."""
        indices: list[int] = []
        actions = self.actions.tobytes()
        for code in codes:
            index = actions.find(code)
            while index >= 0:
                indices.append(index)
                index = actions.find(code, index + 1)
        return sorted(indices) if len(codes) > 1 else indices

    def __len__(self) -> int:
        return len(self.actions)

    @overload
    def __getitem__(self, index: int) -> SnapshotEvent: ...

    @overload
    def __getitem__(self, index: slice) -> list[SnapshotEvent]: ...

    def __getitem__(self, index: int | slice) -> SnapshotEvent | list[SnapshotEvent]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        return self._make_event(
            self.actions[index], self.addresses[index], self.sizes[index], self.streams[index], self.pools[index],
            self.times[index], self.stacks[index],
        )  # fmt: skip

    def __iter__(self) -> Iterator[SnapshotEvent]:
        columns = (self.actions, self.addresses, self.sizes, self.streams, self.pools, self.times, self.stacks)
        return starmap(self._make_event, zip(*columns, strict=True))

    def _make_event(
        self, action: int, address: int, size: int, stream: int, pool: int, time: int, stack: int
    ) -> SnapshotEvent:
        time_us = None if time == NO_TIME else time
        return SnapshotEvent(
            ACTIONS[action], address, size, stream, self.pool_ids[pool], time_us, self.known_stacks[stack]
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"EventColumns({len(self)} events, {len(self.known_stacks)} stacks)"


@dataclass(frozen=True, slots=True)
class CutRange:
    """A placeholder in a list for events that were cut out of a pickle: a range of `CutEvents.rows`."""

    first: int
    count: int


class CutEvents(NamedTuple):
    """Events that were cut out of a pickle; `rows.stacks` has indices into `lists` (0: no frames)."""

    rows: EventColumns
    lists: list[object]  # as they were unpickled
