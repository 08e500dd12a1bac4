"""Release of memory to the driver: on request, when the driver refuses, and by garbage collection.

Source: `release_available_cached_blocks`, `release_cached_blocks` and `garbage_collect_cached_blocks` of
c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left

from memprof.allocator.blocks import ADDRESS_BITS, Block, Pool, StreamPool
from memprof.allocator.config import UNLIMITED
from memprof.allocator.segments import Segments


def release_oversize(segments: Segments, owner: StreamPool, size: int) -> bool:
    """Release oversize segments of this pool and stream to make room for `size`; return whether they suffice.

    Only with a finite max_split_size: one segment that is large enough, else several from the largest down.
    """
    limit = segments.max_split_size
    if limit == UNLIMITED:
        return False
    wanted = max(size, limit)
    at = bisect_left(owner.keys, wanted << ADDRESS_BITS)
    if at < len(owner.keys):
        block = owner.blocks[owner.keys[at]]
        if _fills_segment(block):
            segments.release(block)
            return True
    released = 0
    for key in reversed(owner.keys[:at]):
        block = owner.blocks[key]
        if released >= wanted or block.size < limit:
            break
        if _fills_segment(block):
            released += block.size
            segments.release(block)
    return released >= wanted


def release_pool(segments: Segments, pool: Pool) -> None:
    """Release unsplit free segments, and unmap the unused memory of expandable ones (`release_blocks`)."""
    expandable: list[Block] = []
    for block in pool.free_blocks():
        if block.segment.expandable:
            expandable.append(block)
        elif _fills_segment(block):
            segments.release(block)
    for block in expandable:
        segments.shrink(block)


def collect_garbage(segments: Segments, pool: Pool, threshold: int) -> None:
    """Release old unsplit segments of `pool` if more than `threshold` bytes are taken from the driver."""
    target = segments.total_bytes - threshold
    unsplit = [block for block in pool.free_blocks() if block.prev is None and block.next is None]
    ages = sum(pool.calls - block.gc_base for block in unsplit)
    count = len(unsplit)
    reclaimed, freed = 0, True
    while reclaimed < target and freed and count > 0:
        mean = ages / count
        freed = False
        remaining: list[Block] = []
        for block in unsplit:
            age = pool.calls - block.gc_base
            if block.segment.expandable or age < mean:
                remaining.append(block)
                continue
            freed = True
            reclaimed += block.size
            ages -= age
            count -= 1
            segments.release(block)
        unsplit = remaining


def _fills_segment(block: Block) -> bool:
    """Return whether the free block is a whole segment of cudaMalloc.

    An oversize block always is, as it is never split, except in a damaged recording.
    """
    return block.prev is None and block.next is None and not block.segment.expandable
