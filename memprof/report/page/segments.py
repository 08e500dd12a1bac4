"""The allocator's segments at the peak, as columns for the page: each block's size, and the kind of its storage."""

from __future__ import annotations

from dataclasses import dataclass, field

from memprof.allocator.pools import pool_name
from memprof.ledger.ledger import Ledger
from memprof.report.page.moments import Moments
from memprof.trace.json_values import JsonValue

FREE = -1  # In place of a kind: a free block.
PENDING_FREE = -2  # In place of a kind: a block whose tensor is freed, and that another stream still uses.


@dataclass(slots=True)
class SegmentColumns(JsonValue):
    """The allocator's segments as columns, largest first, with their blocks in order of address; sizes are bytes."""

    event: int
    size: list[int] = field(default_factory=list)
    pool: list[str] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    # For each segment: size and kind of its first block, of its second, and so on.
    blocks: list[list[int]] = field(default_factory=list)


def build_segments_at_peak(ledger: Ledger, moments: Moments) -> SegmentColumns:
    """Return the segments at the allocated peak, by replaying the run up to the peak."""
    layout, storages = ledger.run.layout_at(ledger.peak_event)
    columns = SegmentColumns(ledger.peak_event)
    for segment in sorted(layout, key=lambda s: -s.size):
        columns.size.append(segment.size)
        columns.pool.append(pool_name(segment.is_small, segment.pool_id))
        columns.stream.append(segment.stream)
        blocks: list[int] = []
        for block in segment.blocks:
            storage = storages.get(block.address) if block.state == "active_allocated" else None
            marker = FREE if block.state == "inactive" else PENDING_FREE
            blocks += (block.size, marker if storage is None else moments.kind_of[storage])
        columns.blocks.append(blocks)
    return columns
