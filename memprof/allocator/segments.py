"""Segments: their allocation from and release to the driver, and growth and shrinking of expandable segments.

Source: `alloc_block`, `release_block`, `map_block`, `unmap_block`, `find_expandable_block` and
`try_allocate_expandable_block` of c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memprof.allocator.blocks import Block, Segment, StreamPool, absorb_next, split_right
from memprof.allocator.driver import Driver
from memprof.allocator.rounding import SMALL_BUFFER
from memprof.allocator.stats import Statistics


@dataclass(slots=True, eq=False)
class Segments:
    """All segments of one device."""

    driver: Driver
    statistics: Statistics
    large_segment: int  # bytes of `large_segment_size_mb`, the mapping unit of the large pool
    max_split_size: int  # segments of at least this size count as oversize
    address_space: int  # bytes of an expandable segment's reservation, not yet rounded to mapping units
    total_bytes: int = 0  # total_allocated_memory: bytes taken from the driver
    live: dict[int, Segment] = field(default_factory=dict)  # by address

    def allocate(self, owner: StreamPool, size: int) -> Block | None:
        """Allocate a segment of `size` bytes (cudaMalloc) as one block, in no list. Return None if the GPU is full."""
        address = self.driver.malloc(size)
        if address is None:
            return None
        if size >= self.max_split_size:
            self.statistics.oversize_segments.add()
        self.count_driver_bytes(owner, size, 1)
        return self.add_segment(owner, address, size)

    def count_driver_bytes(self, owner: StreamPool, num_bytes: int, num_segments: int) -> None:
        """Add bytes and segments from the driver to the counters of `owner`; negative: released to the driver."""
        self.total_bytes += num_bytes
        owner.counters.count_reserved(num_bytes, num_segments)
        owner.total.count_reserved(num_bytes, num_segments)
        if num_bytes > 0:
            self.statistics.num_device_alloc += 1
        else:
            self.statistics.num_device_free += 1

    def add_segment(self, owner: StreamPool, address: int, size: int, *, expandable: bool = False) -> Block:
        """Add an existing segment; return its one block, in no list."""
        segment = Segment(address, size, expandable=expandable, unit=self.get_mapping_unit(owner) if expandable else 0)
        block = segment.first = Block(address, size, owner, segment, None, None)
        self.live[address] = segment
        return block

    def release(self, block: Block) -> None:
        """Release the segment that the free `block` fills (cudaFree)."""
        owner, size = block.owner, block.size
        self.driver.free(block.address, size)
        if size >= self.max_split_size:
            self.statistics.oversize_segments.current -= 1
        self.count_driver_bytes(owner, -size, -1)
        owner.remove(block)
        del self.live[block.address]

    # -- expandable segments ---------------------------------------------------------------------------------------

    def get_mapping_unit(self, owner: StreamPool) -> int:
        """Return the size in bytes of one mapping: 2 MiB for small blocks, `large_segment` for large ones."""
        return SMALL_BUFFER if owner.is_small else self.large_segment

    def grow(self, owner: StreamPool, size: int) -> Block | None:
        """Map memory for a block of at least `size` bytes, and return it, in no list. None if the GPU is full.

        Memory that was mapped before the GPU was full stays mapped and free.
        """
        block = self.find_expandable_block(owner, size) or self._reserve_segment(owner)
        if not block.mapped:
            mapped_block = self._map_memory(block, min(block.size, size))
            if mapped_block is None:
                return None
            block = mapped_block
        while block.size < size:
            next_block = block.next
            if next_block is None:
                return None  # larger than the whole reservation
            mapped_block = self._map_memory(next_block, min(size - block.size, next_block.size))
            if mapped_block is None:
                return None
            block = mapped_block
        owner.remove(block)
        return block

    def shrink(self, block: Block) -> None:
        """Unmap the complete mapping units in the free `block`. Remove the segment if nothing in it stays mapped."""
        segment, owner = block.segment, block.owner
        begin, end = find_mapping_units(block)
        if begin >= end:
            return
        self.driver.unmap(begin, end - begin)
        owner.remove(block)
        middle = block
        if begin > block.address:
            middle = split_right(block, begin - block.address)
            owner.insert(block)
        if end < middle.address + middle.size:
            owner.insert(split_right(middle, end - middle.address))
        left, right = middle.prev, middle.next
        if right is not None and not right.mapped:
            owner.remove_unmapped(right)
            absorb_next(middle)
        if left is not None and not left.mapped:
            owner.remove_unmapped(left)
            absorb_next(left)
            middle = left
        owner.insert_unmapped(middle)
        self.count_driver_bytes(owner, begin - end, 0)
        if middle.prev is None and middle.next is None:
            owner.remove_unmapped(middle)
            del self.live[segment.address]
            self.driver.unreserve(segment.address, segment.size)

    def find_expandable_block(self, owner: StreamPool, size: int) -> Block | None:
        """Return the first of adjacent free or unmapped blocks with room for `size`, at the lowest address."""
        for address in owner.unmapped:
            block = owner.unmapped_blocks[address]
            if block.prev is not None and block.prev.free:
                block = block.prev
            num_bytes = 0
            current: Block | None = block
            while num_bytes < size and current is not None and current.free:
                num_bytes += current.size
                current = current.next
            if num_bytes >= size:
                return block
        return None

    def _reserve_segment(self, owner: StreamPool) -> Block:
        """Reserve a new expandable segment; return its one block, which is unmapped."""
        unit = self.get_mapping_unit(owner)
        num_bytes = -(-self.address_space // unit) * unit
        block = self.add_segment(owner, self.driver.reserve(num_bytes), num_bytes, expandable=True)
        owner.insert_unmapped(block)
        return block

    def _map_memory(self, block: Block, size: int) -> Block | None:
        """Map memory for the first `size` bytes of the unmapped `block`; return the merged free block, or None."""
        owner = block.owner
        unit = block.segment.unit
        size = -(-size // unit) * unit
        if not self.driver.map(block.address, size):
            return None
        owner.remove_unmapped(block)
        block.mapped = True
        if size < block.size:
            owner.insert_unmapped(split_right(block, size))
        left, right = block.prev, block.next
        if right is not None and right.free and right.mapped:
            owner.remove(right)
            absorb_next(block)
        if left is not None and left.free and left.mapped:
            owner.remove(left)
            absorb_next(left)
            block = left
        owner.insert(block)
        self.count_driver_bytes(owner, size, 0)
        return block


def find_mapping_units(block: Block) -> tuple[int, int]:
    """Return begin and end of the complete mapping units inside `block`; begin >= end if there are none."""
    base, unit = block.segment.address, block.segment.unit
    begin = base + -(-(block.address - base) // unit) * unit
    return begin, base + (block.address + block.size - base) // unit * unit
