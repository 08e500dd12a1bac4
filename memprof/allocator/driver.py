"""Where segments come from: the CUDA driver, or what stands in for it.

The driver's addresses are the one input of the allocator that its own rules do not give. They decide between free
blocks of equal size, nothing else. A simulation takes `SimulatedDriver`; the replay of a snapshot takes the addresses
from the recording (recorded.py).
"""

from __future__ import annotations

from bisect import insort
from typing import Protocol

GRANULARITY = 2 << 20  # the driver backs memory with pages of 2 MiB

FIRST_ADDRESS = 0x7F0000000000  # where cudaMalloc starts; recorded addresses on Linux lie near here

FIRST_RESERVATION = 0x10000000000  # where the address space of expandable segments starts, apart from cudaMalloc's


class Driver(Protocol):
    """What the allocator asks of the driver."""

    def malloc(self, size: int) -> int | None:
        """cudaMalloc: an address, or None when the memory is not there."""

    def free(self, address: int, size: int) -> None:
        """cudaFree of a whole segment."""

    def reserve(self, size: int) -> int:
        """cuMemAddressReserve: address space without memory."""

    def unreserve(self, address: int, size: int) -> None:
        """cuMemAddressFree."""

    def map(self, address: int, size: int) -> bool:
        """cuMemCreate and cuMemMap of all of `size`, or of nothing (False)."""

    def unmap(self, address: int, size: int) -> None:
        """cuMemUnmap and cuMemRelease."""

    def memory_info(self) -> tuple[int, int]:
        """cudaMemGetInfo: free and total bytes."""


class SimulatedDriver:
    """A device with so many bytes: addresses rise, and the lowest freed range that is large enough is used again.

    Args:
        total_bytes: capacity of the card, as cudaMemGetInfo gives it; None for a card without limit.
        other_bytes: what is taken of it outside the allocator: the CUDA context, libraries, other processes.
    """

    def __init__(self, total_bytes: int | None, other_bytes: int = 0) -> None:
        self.total_bytes = total_bytes
        self.other_bytes = other_bytes
        self.used_bytes = 0
        self.refusals = 0  # requests that did not fit
        self._top = FIRST_ADDRESS
        self._next_reservation = FIRST_RESERVATION
        self._holes: list[tuple[int, int]] = []  # (address, size), sorted, never adjacent

    def lift_limit(self) -> None:
        """From now on the memory never ends: what a run would need although it does not fit."""
        self.total_bytes = None

    def malloc(self, size: int) -> int | None:
        """See Driver."""
        size = -(-size // GRANULARITY) * GRANULARITY
        if not self._take(size):
            return None
        for index, (address, hole) in enumerate(self._holes):
            if hole >= size:
                if hole == size:
                    del self._holes[index]
                else:
                    self._holes[index] = (address + size, hole - size)
                return address
        address = self._top
        self._top += size
        return address

    def free(self, address: int, size: int) -> None:
        """See Driver."""
        size = -(-size // GRANULARITY) * GRANULARITY
        self.used_bytes -= size
        insort(self._holes, (address, size))
        index = self._holes.index((address, size))
        if index + 1 < len(self._holes) and address + size == self._holes[index + 1][0]:
            size += self._holes.pop(index + 1)[1]
        if index and sum(self._holes[index - 1]) == address:
            address, before = self._holes.pop(index - 1)
            size += before
            index -= 1
        self._holes[index] = (address, size)

    def reserve(self, size: int) -> int:
        """See Driver."""
        address = self._next_reservation
        self._next_reservation += -(-size // GRANULARITY) * GRANULARITY
        return address

    def unreserve(self, address: int, size: int) -> None:
        """See Driver."""

    def map(self, address: int, size: int) -> bool:
        """See Driver."""
        return self._take(size)

    def unmap(self, address: int, size: int) -> None:
        """See Driver."""
        self.used_bytes -= size

    def memory_info(self) -> tuple[int, int]:
        """See Driver. Without a limit: nothing is free of what is in use."""
        used = self.used_bytes + self.other_bytes
        total = used if self.total_bytes is None else self.total_bytes
        return max(total - used, 0), total

    def _take(self, size: int) -> bool:
        if self.total_bytes is not None and self.used_bytes + self.other_bytes + size > self.total_bytes:
            self.refusals += 1
            return False
        self.used_bytes += size
        return True
