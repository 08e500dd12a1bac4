"""Memory pools (default and private), each with a small and a large size class, and their segments as a snapshot."""

from __future__ import annotations

from collections.abc import Iterable

from memprof.allocator.blocks import Block, Pool, Segment
from memprof.allocator.stats import Statistics
from memprof.trace.snapshot import DEFAULT_POOL, BlockState, PoolId, SnapshotBlock, SnapshotSegment


class PrivatePool:
    """The small and large blocks of a private pool (torch's `PrivatePool`), or of the default pool."""

    def __init__(self, pool_id: PoolId, statistics: Statistics) -> None:
        self.small = Pool(pool_id, is_small=True, counters=statistics.small_pool, total=statistics.all)
        self.large = Pool(pool_id, is_small=False, counters=statistics.large_pool, total=statistics.all)


def pool_name(is_small: bool, pool_id: PoolId) -> str:
    """Return the name of a pool for reports: "small" or "large", with the pool id if it is private."""
    size_class = "small" if is_small else "large"
    return size_class if pool_id == DEFAULT_POOL else f"{size_class}, private {pool_id}"


def build_layout(segments: Iterable[Segment]) -> list[SnapshotSegment]:
    """Return all mapped ranges of `segments` by address, in the form of a snapshot."""
    snapshot_segments: list[SnapshotSegment] = []
    for segment in segments:
        run: list[Block] = []
        block: Block | None = segment.first
        while block is not None:
            if block.mapped:
                run.append(block)
            if run and (not block.mapped or block.next is None):
                snapshot_segments.append(_build_segment(segment, run))
                run = []
            block = block.next
    return sorted(snapshot_segments)


def _build_segment(segment: Segment, run: list[Block]) -> SnapshotSegment:
    owner = run[0].owner
    blocks = [
        SnapshotBlock(block.address, block.size, 0 if block.free else block.requested, _get_block_state(block))
        for block in run
    ]
    return SnapshotSegment(
        device=0,
        address=run[0].address,
        size=sum(block.size for block in run),
        stream=owner.stream,
        is_small=owner.is_small,
        pool_id=owner.pool.pool_id,
        expandable=segment.expandable,
        blocks=tuple(blocks),
    )


def _get_block_state(block: Block) -> BlockState:
    if block.free:
        return BlockState.INACTIVE
    return BlockState.PENDING_FREE if block.events else BlockState.ALLOCATED
