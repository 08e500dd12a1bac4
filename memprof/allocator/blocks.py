"""Blocks of the caching allocator, the segments that they divide, and the free blocks of one pool on one stream."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from memprof.allocator.stats import Counters
from memprof.trace.snapshot import PoolId

ADDRESS_BITS = 57  # bits of a virtual address (5-level paging); a free block's key is `size << ADDRESS_BITS | address`


@dataclass(slots=True, eq=False)
class Segment:
    """Memory from the driver: one cudaMalloc, or the address space of one expandable segment."""

    address: int
    size: int
    expandable: bool = False
    unit: int = 0  # mapping granularity of an expandable segment
    first: Block = field(init=False)  # constant: blocks grow to the right and are split at the right


@dataclass(slots=True, eq=False, repr=False)
class Block:
    """A part of a segment, allocated or free, with links to its neighbours in the segment."""

    address: int
    size: int
    owner: StreamPool
    segment: Segment
    prev: Block | None
    next: Block | None
    requested: int = 0
    free: bool = False  # True when it is in the free blocks of its owner, or unmapped
    mapped: bool = True  # False for a range of an expandable segment's address space without memory
    events: int = 0  # number of other streams' events that must complete before the block is free again
    uses: set[int] | None = None  # streams given to record_stream
    gc_base: int = 0  # searches of its pool when it became free: garbage collection derives the block's age

    def __repr__(self) -> str:
        state = "unmapped" if not self.mapped else "free" if self.free else "active"
        return f"Block({self.address:#x}, {self.size}, {state})"


@dataclass(slots=True, eq=False)
class Pool:
    """The free blocks of one size class (small or large) of the default pool or a private one, by stream."""

    pool_id: PoolId
    is_small: bool
    counters: Counters
    total: Counters
    num_searches: int = 0  # get_free_blocks_call_count: counted while garbage collection is on
    streams: dict[int, StreamPool] = field(default_factory=dict)

    def get_stream_pool(self, stream: int) -> StreamPool:
        """Return the free blocks of `stream`; create an empty entry at the first use of the stream."""
        stream_pool = self.streams.get(stream)
        if stream_pool is None:
            stream_pool = self.streams[stream] = StreamPool(self, stream)
        return stream_pool

    def list_free_blocks(self) -> list[Block]:
        """Return every free block in the allocator's order: stream, size, address."""
        return [self.streams[s].blocks[key] for s in sorted(self.streams) for key in self.streams[s].keys]


class StreamPool:
    """The free blocks of one pool on one stream, by size and address, and the unmapped blocks by address."""

    __slots__ = ("blocks", "counters", "is_small", "keys", "pool", "stream", "total", "unmapped", "unmapped_blocks")

    def __init__(self, pool: Pool, stream: int) -> None:
        self.pool = pool
        self.stream = stream
        self.is_small = pool.is_small
        self.counters = pool.counters
        self.total = pool.total
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.unmapped: list[int] = []
        self.unmapped_blocks: dict[int, Block] = {}

    def insert(self, block: Block) -> None:
        """Add `block` to the free blocks."""
        key = block.size << ADDRESS_BITS | block.address
        insort(self.keys, key)
        self.blocks[key] = block
        block.free = True
        block.gc_base = self.pool.num_searches

    def remove(self, block: Block) -> None:
        """Remove `block` from the free blocks."""
        key = block.size << ADDRESS_BITS | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.blocks[key]
        block.free = False

    def insert_unmapped(self, block: Block) -> None:
        """Add `block` to the unmapped blocks, which are address space without memory."""
        insort(self.unmapped, block.address)
        self.unmapped_blocks[block.address] = block
        block.free = True
        block.mapped = False

    def remove_unmapped(self, block: Block) -> None:
        """Remove `block` from the unmapped blocks."""
        del self.unmapped[bisect_left(self.unmapped, block.address)]
        del self.unmapped_blocks[block.address]
        block.free = False


def absorb_next(block: Block) -> None:
    """Merge `block` with the block after it, which the caller has removed from all lists."""
    next_block = block.next
    assert next_block is not None
    block.size += next_block.size
    block.next = next_block.next
    if next_block.next is not None:
        next_block.next.prev = block


def split_right(block: Block, size: int) -> Block:
    """Shrink `block` to `size` bytes; return the remainder as a new block after it, in no list yet."""
    rest = Block(block.address + size, block.size - size, block.owner, block.segment, block, block.next)
    if block.next is not None:
        block.next.prev = rest
    block.next = rest
    block.size = size
    return rest
