"""The driver of a recording: it answers as the recorded one did, and notes a question that was not asked of it."""

from __future__ import annotations

from collections.abc import Mapping

from memprof.allocator.caching import UNKNOWN_SPACE
from memprof.trace.columns import FREE_COMPLETED, SEGMENT_MAP, EventColumns
from memprof.trace.snapshot import Action, SnapshotEvent

TAKES = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
RETURNS = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)

_FOREIGN = 1 << 56  # addresses for segments that the recording did not take


class RecordedDriver:
    """Answers as the recorded driver did. `at` moves through the segment events."""

    def __init__(self, events: EventColumns, large_segment: int) -> None:
        self.events = events
        self.large_segment = large_segment
        self.stream = 0
        self.small = False  # what the request is for: set before each
        self.spaces: dict[int, int] = {}  # reservations by address, with their sizes
        self.live: Mapping[int, object] = {}  # by address: the segments that there are
        self.at = 0
        self.problem: str | None = None
        self._foreign = _FOREIGN

    def malloc(self, size: int) -> int | None:
        """The address of the next recorded segment; None if the recorded driver refused."""
        event = self.next()
        if event is not None and event.action is Action.SEGMENT_ALLOC and event.size == size:
            self.at += 1
            if event.address not in self.live:
                return event.address
            self.differs(f"a segment was taken at {event.address:#x}, where there is one")
            return self._new(size)
        if event is not None and (event.action in RETURNS or event.action is Action.OOM):
            return None
        self.differs(f"a segment of {size} bytes was not taken")
        return self._new(size)

    def free(self, address: int, size: int) -> None:
        """Must be the next recorded one."""
        self._given_back(Action.SEGMENT_FREE, address, size)

    def reserve(self, size: int) -> int:
        """Where the next recorded mapping for this stream and pool is; it may be far off, if this one is refused."""
        events = self.events
        for at in events.places(SEGMENT_MAP):
            address = events.addresses[at]
            if (
                at >= self.at
                and not self._taken(address)
                and events.streams[at] == self.stream
                and (events.sizes[at] % self.large_segment != 0) == self.small
            ):
                self.spaces[address] = size
                return address
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
        if event is not None and (event.action in RETURNS or event.action is Action.OOM):
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
        while self.at < len(self.events) and self.events.actions[self.at] == FREE_COMPLETED:
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
