"""The CUDA driver that segments come from: a simulated one, or the recorded results of a real one.

The driver's addresses are the only input of the allocator that its own rules do not determine. They decide only which
of several free blocks of equal size is used.
"""

from __future__ import annotations

from collections.abc import Mapping

from memprof.allocator.addresses import GRANULARITY, AddressSpace
from memprof.trace.columns import FREE_COMPLETED, SEGMENT_MAP, EventColumns
from memprof.trace.snapshot import Action, SnapshotEvent

FIRST_RESERVATION = 0x10000000000  # begin of the address space for expandable segments, away from cudaMalloc's
UNKNOWN_SPACE = 1 << 50  # address space of an expandable segment when the GPU's memory is unknown

SEGMENT_ADDITIONS = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
SEGMENT_REMOVALS = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)

_FIRST_FOREIGN_ADDRESS = 1 << 56  # addresses for segments that are not in the recording


class SimulatedDriver:
    """A GPU with `total_bytes` of memory, and addresses in the order of the Linux driver.

    `total_bytes` is that of cudaMemGetInfo; None: unlimited. `other_bytes` of it are used by the CUDA context, by
    libraries and other processes.
    """

    def __init__(self, total_bytes: int | None, other_bytes: int = 0) -> None:
        self.total_bytes = total_bytes
        self.other_bytes = other_bytes
        self.used_bytes = 0
        self.num_refusals = 0  # failed requests
        self._addresses = AddressSpace()
        self._next_reservation = FIRST_RESERVATION

    def lift_limit(self) -> None:
        """Make the GPU's memory unlimited from now on, to find how much a run needs that does not fit."""
        self.total_bytes = None

    def malloc(self, size: int) -> int | None:
        """Return the address of a new segment (cudaMalloc); None when memory is exhausted."""
        size = -(-size // GRANULARITY) * GRANULARITY
        return self._addresses.allocate(size) if self._take_bytes(size) else None

    def free(self, address: int, size: int) -> None:
        """Free the segment of `size` bytes at `address` (cudaFree)."""
        size = -(-size // GRANULARITY) * GRANULARITY
        self.used_bytes -= size
        self._addresses.free(address, size)

    def reserve(self, size: int) -> int:
        """Reserve `size` bytes of address space without memory (cuMemAddressReserve); return its address."""
        address = self._next_reservation
        self._next_reservation += -(-size // GRANULARITY) * GRANULARITY
        return address

    def unreserve(self, address: int, size: int) -> None:
        """Do nothing: address space is unlimited (cuMemAddressFree)."""

    def map(self, address: int, size: int) -> bool:
        """Map `size` bytes of memory (cuMemCreate, cuMemMap); return whether there was enough memory."""
        return self._take_bytes(size)

    def unmap(self, address: int, size: int) -> None:
        """Unmap and release `size` bytes of memory (cuMemUnmap, cuMemRelease)."""
        self.used_bytes -= size

    def memory_info(self) -> tuple[int, int]:
        """Return free and total bytes (cudaMemGetInfo); on an unlimited GPU, 0 and the used bytes."""
        used = self.used_bytes + self.other_bytes
        total = used if self.total_bytes is None else self.total_bytes
        return max(total - used, 0), total

    def _take_bytes(self, size: int) -> bool:
        if self.total_bytes is not None and self.used_bytes + self.other_bytes + size > self.total_bytes:
            self.num_refusals += 1
            return False
        self.used_bytes += size
        return True


class RecordedDriver:
    """A driver that returns the recorded results of a real driver; `event_index` is the next event to use."""

    def __init__(self, events: EventColumns, large_segment: int) -> None:
        self.events = events
        self.large_segment = large_segment
        self.stream = 0
        self.is_small = False  # whether the request is for the small pool; set before each request
        self.spaces: dict[int, int] = {}  # spaces by address, with their sizes
        self.live_segments: Mapping[int, object] = {}  # the current segments by address
        self.event_index = 0
        self.problem: str | None = None
        self._next_foreign_address = _FIRST_FOREIGN_ADDRESS

    def malloc(self, size: int) -> int | None:
        """Return the address of the next recorded segment; None if the recorded driver had no memory."""
        event = self.find_next_event()
        if event is not None and event.action is Action.SEGMENT_ALLOC and event.size == size:
            self.event_index += 1
            if event.address not in self.live_segments:
                return event.address
            self.report(f"a segment was taken at {event.address:#x}, where there is one")
            return self._make_address(size)
        if event is not None and (event.action in SEGMENT_REMOVALS or event.action is Action.OOM):
            return None
        self.report(f"a segment of {size} bytes was not taken")
        return self._make_address(size)

    def free(self, address: int, size: int) -> None:
        """Compare the free of this segment with the next recorded free."""
        self._compare_release(Action.SEGMENT_FREE, address, size)

    def reserve(self, size: int) -> int:
        """Return the address of the next mapping recorded for this stream and pool; if none, an unused address."""
        events = self.events
        for index in events.find_indices(SEGMENT_MAP):
            address = events.addresses[index]
            if (
                index >= self.event_index
                and not self._is_reserved(address)
                and events.streams[index] == self.stream
                and (events.sizes[index] % self.large_segment != 0) == self.is_small
            ):
                self.spaces[address] = size
                return address
        address = self._make_address(size)
        self.spaces[address] = size
        return address

    def unreserve(self, address: int, size: int) -> None:
        """Remove the reservation; recordings have no event for it."""
        del self.spaces[address]

    def map(self, address: int, size: int) -> bool:
        """Return whether the recorded driver mapped these `size` bytes."""
        event = self.find_next_event()
        if event is not None and event.action is Action.SEGMENT_MAP and (event.address, event.size) == (address, size):
            self.event_index += 1
            return True
        if event is not None and (event.action in SEGMENT_REMOVALS or event.action is Action.OOM):
            return False
        self.report(f"{size} bytes at {address:#x} were not mapped")
        return True

    def unmap(self, address: int, size: int) -> None:
        """Compare this unmapping with the next recorded one."""
        self._compare_release(Action.SEGMENT_UNMAP, address, size)

    def memory_info(self) -> tuple[int, int]:
        """Return zeros: a snapshot does not record the memory of the GPU."""
        return 0, 0

    def _compare_release(self, action: Action, address: int, size: int) -> None:
        event = self.find_next_event()
        if event is not None and (event.action, event.address, event.size) == (action, address, size):
            self.event_index += 1
        else:
            self.report(f"{size} bytes at {address:#x} were not released here")

    def find_next_event(self) -> SnapshotEvent | None:
        """Skip completed frees; return the next event, or None at the end of the recording."""
        while self.event_index < len(self.events) and self.events.actions[self.event_index] == FREE_COMPLETED:
            self.event_index += 1
        return self.events[self.event_index] if self.event_index < len(self.events) else None

    def report(self, problem: str) -> None:
        """Record `problem` as the difference, unless one is already recorded."""
        self.problem = self.problem or problem

    def _is_reserved(self, address: int) -> bool:
        """Return whether `address` is in a reservation; one of unknown size has only its first address."""
        return any(
            address == base or (size < UNKNOWN_SPACE and base <= address < base + size)
            for base, size in self.spaces.items()
        )

    def _make_address(self, size: int) -> int:
        self._next_foreign_address += size
        return self._next_foreign_address - size


Driver = SimulatedDriver | RecordedDriver
