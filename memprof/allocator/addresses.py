"""Simulated addresses of cudaMalloc's memory: of free blocks of equal size, the allocator uses the lowest address."""

from __future__ import annotations

import contextlib
from bisect import insort
from collections.abc import Iterator

GRANULARITY = 2 << 20  # the driver backs memory with pages of 2 MiB
_CHUNK_BYTES = 32 << 20
_CHUNK_PAGES = _CHUNK_BYTES // GRANULARITY
_TOP_ADDRESS = 0x7F0000000000  # recorded addresses on Linux are near this one


class AddressSpace:
    """Assigns addresses in the order of the CUDA driver on Linux: each is below the last one.

    Address space is taken in chunks of 32 MiB, from the top of the highest free range that is large enough, as in mmap.
    The unused remainder of a request's chunks serves later requests: of the chunks with room, the newest is used.

    The driver is closed, so the rule is derived from recordings: it orders 93% of the pairs of segments as recorded, in
    19 recordings on an H100 (driver 580), and 91% in 11 public ones (rising addresses: 12% and 10%). With this rule all
    19 replays have the GPU's allocated and reserved peaks, to the byte.
    """

    def __init__(self) -> None:
        self._lowest_address = _TOP_ADDRESS
        self._free_ranges: list[tuple[int, int]] = []  # (address, bytes) without memory, sorted, never adjacent
        self._ranges: dict[int, _AddressRange] = {}  # by age
        self._ages_by_room: list[list[int]] = [[] for _ in range(_CHUNK_PAGES + 1)]
        self._range_by_address: dict[int, _AddressRange] = {}  # by the address of a request
        self._last_age = 0

    def allocate(self, size: int) -> int:
        """Return the address of a new allocation of `size` bytes, a multiple of GRANULARITY."""
        address_range = self._find_youngest_with_room(size) or self._open_range(-(-size // _CHUNK_BYTES) * _CHUNK_BYTES)
        with self._reindex(address_range):
            address = address_range.allocate(size)
        self._range_by_address[address] = address_range
        return address

    def free(self, address: int, size: int) -> None:
        """Free the allocation of `size` bytes at `address`, which `allocate` returned."""
        address_range = self._range_by_address.pop(address)
        with self._reindex(address_range):
            address_range.free(address, size)
        if address_range.room == address_range.size:
            del self._ranges[address_range.age]
            self._ages_by_room[_count_pages(address_range.room)].remove(address_range.age)
            self._free_ranges = _merge_range(self._free_ranges, address_range.address, address_range.size)

    def _find_youngest_with_room(self, size: int) -> _AddressRange | None:
        ages = [ages[-1] for ages in self._ages_by_room[_count_pages(size) : _CHUNK_PAGES] if ages]
        # The room of larger ranges varies: a range with a chunk or more has lost a large request.
        large_ages = (age for age in reversed(self._ages_by_room[_CHUNK_PAGES]) if self._ranges[age].room >= size)
        ages += [age for age in [next(large_ages, None)] if age is not None]
        return self._ranges[max(ages)] if ages else None

    def _open_range(self, length: int) -> _AddressRange:
        """Return a new range of `length` bytes, from the highest sufficient free range or below all ranges."""
        for index in reversed(range(len(self._free_ranges))):
            address, size = self._free_ranges[index]
            if size >= length:
                self._free_ranges[index : index + 1] = [(address, size - length)] if size > length else []
                address += size - length
                break
        else:
            self._lowest_address -= length
            address = self._lowest_address
        self._last_age += 1
        new_range = self._ranges[self._last_age] = _AddressRange(self._last_age, address, length)
        self._ages_by_room[_count_pages(new_range.room)].append(new_range.age)
        return new_range

    @contextlib.contextmanager
    def _reindex(self, address_range: _AddressRange) -> Iterator[None]:
        """Context manager: keep `_ages_by_room` current while the room of `address_range` changes."""
        self._ages_by_room[_count_pages(address_range.room)].remove(address_range.age)
        yield
        insort(self._ages_by_room[_count_pages(address_range.room)], address_range.age)


class _AddressRange:
    """The chunks of 32 MiB that one request reserved, and the free ranges in them."""

    def __init__(self, age: int, address: int, size: int) -> None:
        self.age = age
        self.address = address
        self.size = size
        self._free_ranges = [(address, size)]

    @property
    def room(self) -> int:
        """Return the bytes of the largest free range."""
        return max((size for _, size in self._free_ranges), default=0)

    def allocate(self, size: int) -> int:
        """Allocate `size` bytes; return their address, the lowest possible. The caller first checks `room`."""
        index = next(index for index, (_, room) in enumerate(self._free_ranges) if room >= size)
        address, room = self._free_ranges[index]
        self._free_ranges[index : index + 1] = [(address + size, room - size)] if room > size else []
        return address

    def free(self, address: int, size: int) -> None:
        self._free_ranges = _merge_range(self._free_ranges, address, size)


def _count_pages(room: int) -> int:
    return min(room // GRANULARITY, _CHUNK_PAGES)


def _merge_range(free_ranges: list[tuple[int, int]], address: int, size: int) -> list[tuple[int, int]]:
    """Return the sorted `free_ranges` with another range (`size` bytes at `address`), adjacent ranges merged."""
    merged: list[tuple[int, int]] = []
    for start, length in sorted([*free_ranges, (address, size)]):
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return merged
