"""The two size classes of the default or a private pool, and the layout of segments as a snapshot shows it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from memprof.allocator.blocks import DEFAULT_POOL, Block, Pool, PoolId, Segment
from memprof.allocator.stats import Statistics


class PrivatePool:
    """`PrivatePool`; the default pool is one that never ends."""

    __slots__ = ("large", "small")

    def __init__(self, pool_id: PoolId, statistics: Statistics) -> None:
        self.small = Pool(pool_id, is_small=True, counters=statistics.small_pool, total=statistics.all)
        self.large = Pool(pool_id, is_small=False, counters=statistics.large_pool, total=statistics.all)


class BlockLayout(NamedTuple):
    """One block as a snapshot shows it."""

    address: int
    size: int
    requested: int
    """Bytes asked for; 0 when it is free."""
    state: str
    """active_allocated, active_pending_free (waits for other streams) or inactive."""


class SegmentLayout(NamedTuple):
    """One segment as a snapshot shows it: of an expandable segment, one contiguous mapped run."""

    address: int
    size: int
    stream: int
    is_small: bool
    pool_id: PoolId
    expandable: bool
    blocks: tuple[BlockLayout, ...]

    @property
    def allocated(self) -> int:
        """Bytes of its blocks that are handed out."""
        return sum(block.size for block in self.blocks if block.state == "active_allocated")

    @property
    def largest_free(self) -> int:
        """Bytes of its largest free block."""
        return max((block.size for block in self.blocks if block.state == "inactive"), default=0)

    def releasable(self, unit: int) -> int:
        """Free bytes that `torch.cuda.empty_cache()` gives back: the whole segment if nothing is in it. A private pool
        keeps its own.

        Args:
            unit: bytes that an expandable segment maps at a time; of such a one every free unit goes back
                (`ExpandableSegment::unmap` of c10/cuda/CUDACachingAllocator.cpp).
        """
        if self.pool_id != DEFAULT_POOL:
            return 0
        free = [block for block in self.blocks if block.state == "inactive"]
        if not self.expandable:
            return self.size if len(free) == len(self.blocks) else 0
        found = 0
        for block in free:  # runs begin at whole units
            begin = block.address - self.address
            found += max((begin + block.size) // unit - -(-begin // unit), 0) * unit
        return found


def pool_name(is_small: bool, pool_id: PoolId) -> str:
    """`small` or `large`; of a private pool (CUDA graphs) with its number."""
    size = "small" if is_small else "large"
    return size if pool_id == DEFAULT_POOL else f"{size}, private {pool_id}"


def state_of(block: Block) -> str:
    """The block's state in a snapshot's words."""
    if block.free:
        return "inactive"
    return "active_pending_free" if block.events else "active_allocated"


def layout_of(segments: Iterable[Segment]) -> list[SegmentLayout]:
    """All mapped runs of `segments` by address."""
    found: list[SegmentLayout] = []
    for segment in segments:
        run: list[Block] = []
        block: Block | None = segment.first
        while block is not None:
            if block.mapped:
                run.append(block)
            if run and (not block.mapped or block.next is None):
                found.append(_run_layout(segment, run))
                run = []
            block = block.next
    return sorted(found)


def _run_layout(segment: Segment, run: list[Block]) -> SegmentLayout:
    owner = run[0].owner
    return SegmentLayout(
        address=run[0].address,
        size=sum(block.size for block in run),
        stream=owner.stream,
        is_small=owner.is_small,
        pool_id=owner.pool.pool_id,
        expandable=segment.expandable,
        blocks=tuple(
            BlockLayout(block.address, block.size, 0 if block.free else block.requested, state_of(block))
            for block in run
        ),
    )
