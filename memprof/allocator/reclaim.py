"""Release of cached memory to the driver: by empty_cache, when the GPU is full, and by garbage collection.

Source: `release_available_cached_blocks`, `release_cached_blocks` and `garbage_collect_cached_blocks` of
c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left

from memprof.allocator.blocks import ADDRESS_BITS, Block, Pool, StreamPool
from memprof.allocator.config import UNLIMITED
from memprof.allocator.segments import Segments


def release_oversize(segments: Segments, owner: StreamPool, size: int) -> bool:
    """Release free oversize segments of `owner` to make room for `size` bytes; return whether there is enough room.

    Without a limit max_split_size, release none; else one that is large enough, or several, the largest first.
    """
    max_split_size = segments.max_split_size
    if max_split_size == UNLIMITED:
        return False
    min_bytes = max(size, max_split_size)
    index = bisect_left(owner.keys, min_bytes << ADDRESS_BITS)
    if index < len(owner.keys):
        block = owner.blocks[owner.keys[index]]
        if _fills_segment(block):
            segments.release(block)
            return True
    released_bytes = 0
    for key in reversed(owner.keys[:index]):
        block = owner.blocks[key]
        if released_bytes >= min_bytes or block.size < max_split_size:
            break
        if _fills_segment(block):
            released_bytes += block.size
            segments.release(block)
    return released_bytes >= min_bytes


def release_pool(segments: Segments, pool: Pool) -> None:
    """Release the free segments of `pool`, and unmap free memory of expandable segments (`release_blocks`)."""
    expandable: list[Block] = []
    for block in pool.list_free_blocks():
        if block.segment.expandable:
            expandable.append(block)
        elif _fills_segment(block):
            segments.release(block)
    for block in expandable:
        segments.shrink(block)


def collect_garbage(segments: Segments, pool: Pool, threshold: int) -> None:
    """Release the oldest free segments of `pool` until at most `threshold` bytes are reserved."""
    target_bytes = segments.total_bytes - threshold
    unsplit_blocks = [block for block in pool.list_free_blocks() if block.prev is None and block.next is None]
    total_age = sum(pool.num_searches - block.gc_base for block in unsplit_blocks)
    num_unsplit = len(unsplit_blocks)
    reclaimed_bytes, has_released = 0, True
    while reclaimed_bytes < target_bytes and has_released and num_unsplit > 0:
        mean_age = total_age / num_unsplit
        has_released = False
        remaining_blocks: list[Block] = []
        for block in unsplit_blocks:
            age = pool.num_searches - block.gc_base
            if block.segment.expandable or age < mean_age:
                remaining_blocks.append(block)
                continue
            has_released = True
            reclaimed_bytes += block.size
            total_age -= age
            num_unsplit -= 1
            segments.release(block)
        unsplit_blocks = remaining_blocks


def _fills_segment(block: Block) -> bool:
    """Return whether the free block is an entire segment of cudaMalloc.

    Oversize blocks always are, as they are never split, except in a damaged recording.
    """
    return block.prev is None and block.next is None and not block.segment.expandable
