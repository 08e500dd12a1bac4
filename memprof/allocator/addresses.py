"""Simulated addresses of cudaMalloc's memory: of free blocks of equal size, the allocator uses the lowest address."""

from __future__ import annotations

import contextlib
from bisect import insort
from collections.abc import Iterator

GRANULARITY = 2 << 20  # the driver backs memory with pages of 2 MiB
_CHUNK = 32 << 20
_CHUNK_PAGES = _CHUNK // GRANULARITY
_TOP = 0x7F0000000000  # recorded addresses on Linux are near this one


class AddressSpace:
    """Addresses in the order of the driver on Linux: each below the last one.

    Address space is taken in chunks of 32 MiB, from the top of the highest free range that is large enough, as in mmap.
    The unused rest of a request's chunks serves later requests: of the chunks with room, the youngest is used.

    The rule is derived from recordings, as the driver is closed: of the pairs of segments in 19 recordings on an H100
    (driver 580) it orders 93% as recorded, in 11 public ones 91%; rising addresses, 12% and 10%. With this rule all 19
    replays have the allocated and reserved peaks of the GPU, to the byte. Other mappings of the process cause the rest.
    """

    def __init__(self) -> None:
        self._bottom = _TOP
        self._free: list[tuple[int, int]] = []  # address and bytes of ranges without memory, sorted, never adjacent
        self._ranges: dict[int, _AddressRange] = {}  # by age
        self._ages_by_room: list[list[int]] = [[] for _ in range(_CHUNK_PAGES + 1)]
        self._range_of: dict[int, _AddressRange] = {}  # by the address of a request
        self._age = 0

    def allocate(self, size: int) -> int:
        """Return the address of `size` bytes, a multiple of GRANULARITY."""
        found = self._find_youngest_with_room(size) or self._open_range(-(-size // _CHUNK) * _CHUNK)
        with self._reindex(found):
            address = found.allocate(size)
        self._range_of[address] = found
        return address

    def free(self, address: int, size: int) -> None:
        """Free the `size` bytes at `address`, which `allocate` returned."""
        found = self._range_of.pop(address)
        with self._reindex(found):
            found.free(address, size)
        if found.room == found.size:
            del self._ranges[found.age]
            self._ages_by_room[_count_pages(found.room)].remove(found.age)
            self._free = _merge_range(self._free, found.address, found.size)

    def _find_youngest_with_room(self, size: int) -> _AddressRange | None:
        ages = [ages[-1] for ages in self._ages_by_room[_count_pages(size) : _CHUNK_PAGES] if ages]
        # The room of larger ranges varies: a range with a chunk or more has lost a large request.
        large = (age for age in reversed(self._ages_by_room[_CHUNK_PAGES]) if self._ranges[age].room >= size)
        ages += [age for age in [next(large, None)] if age is not None]
        return self._ranges[max(ages)] if ages else None

    def _open_range(self, length: int) -> _AddressRange:
        """Take `length` bytes of chunks from the highest free range that is large enough, else below all ranges."""
        for index in reversed(range(len(self._free))):
            address, size = self._free[index]
            if size >= length:
                self._free[index : index + 1] = [(address, size - length)] if size > length else []
                address += size - length
                break
        else:
            self._bottom -= length
            address = self._bottom
        self._age += 1
        new_range = self._ranges[self._age] = _AddressRange(self._age, address, length)
        self._ages_by_room[_count_pages(new_range.room)].append(new_range.age)
        return new_range

    @contextlib.contextmanager
    def _reindex(self, address_range: _AddressRange) -> Iterator[None]:
        """Context manager: update the index of ranges by free bytes, around a change of `address_range`."""
        self._ages_by_room[_count_pages(address_range.room)].remove(address_range.age)
        yield
        insort(self._ages_by_room[_count_pages(address_range.room)], address_range.age)


class _AddressRange:
    """The chunks that one request took, and the free pieces of these chunks."""

    def __init__(self, age: int, address: int, size: int) -> None:
        self.age = age
        self.address = address
        self.size = size
        self._free = [(address, size)]

    @property
    def room(self) -> int:
        """Return the bytes of the largest free piece."""
        return max((size for _, size in self._free), default=0)

    def allocate(self, size: int) -> int:
        """Return the lowest address with room for `size` bytes. The caller checks that there is room."""
        index = next(index for index, (_, room) in enumerate(self._free) if room >= size)
        address, room = self._free[index]
        self._free[index : index + 1] = [(address + size, room - size)] if room > size else []
        return address

    def free(self, address: int, size: int) -> None:
        self._free = _merge_range(self._free, address, size)


def _count_pages(room: int) -> int:
    return min(room // GRANULARITY, _CHUNK_PAGES)


def _merge_range(free: list[tuple[int, int]], address: int, size: int) -> list[tuple[int, int]]:
    """Return the sorted ranges `free` with another range, adjacent ranges merged."""
    merged: list[tuple[int, int]] = []
    for start, length in sorted([*free, (address, size)]):
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return merged
