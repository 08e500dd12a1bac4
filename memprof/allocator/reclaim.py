"""Giving memory back to the driver: on request, when it refuses, and by garbage collection.

Source: `release_available_cached_blocks`, `release_cached_blocks` and `garbage_collect_cached_blocks` of
c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from memprof.allocator.blocks import ADDRESS_BITS, Block, Pool, StreamPool
from memprof.allocator.config import UNLIMITED
from memprof.allocator.segments import Segments

if TYPE_CHECKING:
    from memprof.allocator.caching import CachingAllocator


def release_available(allocator: CachingAllocator, owner: StreamPool, size: int) -> bool:
    """Free oversize segments of this pool and stream that make room for `size`; whether that was done.

    Only with a finite max_split_size. One that is large enough alone, else from the largest down.
    """
    limit = allocator.max_split_size
    if limit == UNLIMITED:
        return False
    store = allocator.segment_store
    wanted = max(size, limit)
    at = bisect_left(owner.keys, wanted << ADDRESS_BITS)
    if at < len(owner.keys):
        block = owner.blocks[owner.keys[at]]
        if _fills_segment(block):
            store.release(block)
            return True
    released = 0
    for key in reversed(owner.keys[:at]):
        block = owner.blocks[key]
        if released >= wanted or block.size < limit:
            break
        if _fills_segment(block):
            released += block.size
            store.release(block)
    return released >= wanted


def release_cached(allocator: CachingAllocator) -> None:
    """Give back every segment that is wholly free: of the default pool, and of private ones that nothing keeps."""
    allocator.synchronize()
    for pool in (allocator.default_pool, *allocator.retired):
        _release_pool(allocator.segment_store, pool.large)
        _release_pool(allocator.segment_store, pool.small)


def _fills_segment(block: Block) -> bool:
    """Whether the driver can take it back as it got it. An oversize one always does, for it is never split; but a
    damaged recording may begin with what no allocator has made."""
    return block.prev is None and block.next is None and not block.segment.expandable


def _release_pool(store: Segments, pool: Pool) -> None:
    """`release_blocks`: free unsplit segments, unmap what expandable ones do not use."""
    expandable: list[Block] = []
    for block in pool.free_blocks():
        if block.segment.expandable:
            expandable.append(block)
        elif _fills_segment(block):
            store.release(block)
    for block in expandable:
        store.shrink(block)


def collect_garbage(allocator: CachingAllocator) -> None:
    """Free old unsplit segments of the default large pool once the threshold is passed."""
    store = allocator.segment_store
    assert allocator.allowed_bytes is not None
    threshold = int(allocator.config.garbage_collection_threshold * allocator.allowed_bytes)
    if store.total_bytes <= threshold:
        return
    target = store.total_bytes - threshold
    pool = allocator.default_pool.large
    unsplit = [block for block in pool.free_blocks() if block.prev is None and block.next is None]
    ages = sum(pool.calls - block.gc_base for block in unsplit)
    count = len(unsplit)
    reclaimed, freed = 0, True
    while reclaimed < target and freed and count > 0:
        mean = ages / count
        freed = False
        kept: list[Block] = []
        for block in unsplit:
            age = pool.calls - block.gc_base
            if block.segment.expandable or age < mean:
                kept.append(block)
                continue
            freed = True
            reclaimed += block.size
            ages -= age
            count -= 1
            store.release(block)
        unsplit = kept
