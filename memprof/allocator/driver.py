"""Sources of segments: a simulated CUDA driver, or the recorded answers of a real one.

The driver's addresses are the one input of the allocator that its own rules do not give. They decide between free
blocks of equal size, nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping

from memprof.allocator.addresses import GRANULARITY, AddressSpace
from memprof.trace.columns import FREE_COMPLETED, SEGMENT_MAP, EventColumns
from memprof.trace.snapshot import Action, SnapshotEvent

FIRST_RESERVATION = 0x10000000000  # where the address space of expandable segments starts, apart from cudaMalloc's
UNKNOWN_SPACE = 1 << 50  # address space of an expandable segment when the GPU's memory is not known

TAKES = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
RETURNS = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)

_FOREIGN = 1 << 56  # addresses for segments that the recording did not take


class SimulatedDriver:
    """A device with so many bytes, whose addresses lie as Linux's do.

    `total_bytes` is cudaMemGetInfo's; None: no limit. `other_bytes` of it are the CUDA context's, libraries' and
    others'.
    """

    def __init__(self, total_bytes: int | None, other_bytes: int = 0) -> None:
        self.total_bytes = total_bytes
        self.other_bytes = other_bytes
        self.used_bytes = 0
        self.refusals = 0  # requests that did not fit
        self._addresses = AddressSpace()
        self._next_reservation = FIRST_RESERVATION

    def lift_limit(self) -> None:
        """Let memory never end from now on: shows what a run would need although it does not fit."""
        self.total_bytes = None

    def malloc(self, size: int) -> int | None:
        """cudaMalloc: an address, or None when the memory is not there."""
        size = -(-size // GRANULARITY) * GRANULARITY
        return self._addresses.allocate(size) if self._take(size) else None

    def free(self, address: int, size: int) -> None:
        """cudaFree of a whole segment."""
        size = -(-size // GRANULARITY) * GRANULARITY
        self.used_bytes -= size
        self._addresses.free(address, size)

    def reserve(self, size: int) -> int:
        """cuMemAddressReserve: address space without memory."""
        address = self._next_reservation
        self._next_reservation += -(-size // GRANULARITY) * GRANULARITY
        return address

    def unreserve(self, address: int, size: int) -> None:
        """Give an address range back (cuMemAddressFree)."""

    def map(self, address: int, size: int) -> bool:
        """cuMemCreate and cuMemMap of all of `size`, or of nothing (False)."""
        return self._take(size)

    def unmap(self, address: int, size: int) -> None:
        """Unmap memory and release it (cuMemUnmap, cuMemRelease)."""
        self.used_bytes -= size

    def memory_info(self) -> tuple[int, int]:
        """cudaMemGetInfo: free and total bytes. Without a limit: nothing is free of what is in use."""
        used = self.used_bytes + self.other_bytes
        total = used if self.total_bytes is None else self.total_bytes
        return max(total - used, 0), total

    def _take(self, size: int) -> bool:
        if self.total_bytes is not None and self.used_bytes + self.other_bytes + size > self.total_bytes:
            self.refusals += 1
            return False
        self.used_bytes += size
        return True


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
        """Return the address of the next recorded segment; None if the recorded driver refused."""
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
        """Return the address of the next mapping recorded for this stream and pool; perhaps far off, if this fails."""
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
        """Do nothing: recordings do not have it."""
        del self.spaces[address]

    def map(self, address: int, size: int) -> bool:
        """Return whether the recorded driver had the memory."""
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
        """Return nothing: the memory of the GPU is not recorded."""
        return 0, 0

    def _given_back(self, action: Action, address: int, size: int) -> None:
        event = self.next()
        if event is not None and (event.action, event.address, event.size) == (action, address, size):
            self.at += 1
        else:
            self.differs(f"{size} bytes at {address:#x} were not released here")

    def next(self) -> SnapshotEvent | None:
        """Return the next event of the driver's, or of what ends a request."""
        while self.at < len(self.events) and self.events.actions[self.at] == FREE_COMPLETED:
            self.at += 1
        return self.events[self.at] if self.at < len(self.events) else None

    def differs(self, problem: str) -> None:
        """Remember the first difference."""
        self.problem = self.problem or problem

    def _taken(self, address: int) -> bool:
        """Return whether a reservation is there; of one whose size is not known, only its beginning says so."""
        return any(
            address == base or (size < UNKNOWN_SPACE and base <= address < base + size)
            for base, size in self.spaces.items()
        )

    def _new(self, size: int) -> int:
        self._foreign += size
        return self._foreign - size


Driver = SimulatedDriver | RecordedDriver
