"""Records of a memory snapshot of torch (`torch.cuda.memory._dump_snapshot`).

Field names follow torch's documentation of the format; sizes are bytes. trace/snapshot_file.py reads the file.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# A key of files that memprof wrote: the `source` of the run, and memprof's `version`.
EXPORT_KEY = "memprof"


class Frame(NamedTuple):
    """One frame of a Python or C++ stack; stacks have the innermost frame first."""

    filename: str
    line: int
    name: str


Stack = tuple[Frame, ...]

PoolId = tuple[int, int]  # `MempoolId_t`
DEFAULT_POOL: PoolId = (0, 0)


class Action(enum.StrEnum):
    """The action of an event in a snapshot's device trace."""

    ALLOC = "alloc"
    FREE_REQUESTED = "free_requested"
    FREE_COMPLETED = "free_completed"
    SEGMENT_ALLOC = "segment_alloc"
    SEGMENT_FREE = "segment_free"
    SEGMENT_MAP = "segment_map"
    SEGMENT_UNMAP = "segment_unmap"
    SNAPSHOT = "snapshot"
    OOM = "oom"
    ANNOTATE = "annotate"


class BlockState(enum.StrEnum):
    """The state of a block in a snapshot."""

    ALLOCATED = "active_allocated"
    PENDING_FREE = "active_pending_free"
    INACTIVE = "inactive"


class SnapshotBlock(NamedTuple):
    """One block of a segment in a snapshot."""

    address: int
    size: int
    requested: int | None  # bytes the program requested, 0 for a free block; None in files without this field
    state: BlockState
    frames: Stack = ()


class SnapshotSegment(NamedTuple):
    """A segment, or one mapped range of an expandable segment. Its blocks cover it without gaps."""

    device: int
    address: int
    size: int
    stream: int
    is_small: bool
    pool_id: PoolId
    expandable: bool
    blocks: tuple[SnapshotBlock, ...]
    frames: Stack = ()

    @property
    def allocated(self) -> int:
        """Return the bytes of the segment's allocated blocks."""
        return sum(block.size for block in self.blocks if block.state is BlockState.ALLOCATED)

    @property
    def largest_free(self) -> int:
        """Return the bytes of the segment's largest free block."""
        return max((block.size for block in self.blocks if block.state is BlockState.INACTIVE), default=0)

    def releasable(self, unit: int) -> int:
        """Return the free bytes that `torch.cuda.empty_cache()` releases: all if no block is in use, else none.

        A private pool releases nothing. An expandable segment releases every free `unit` of bytes
        (`ExpandableSegment::unmap` of c10/cuda/CUDACachingAllocator.cpp).
        """
        if self.pool_id != DEFAULT_POOL:
            return 0
        free_blocks = [block for block in self.blocks if block.state is BlockState.INACTIVE]
        if not self.expandable:
            return self.size if len(free_blocks) == len(self.blocks) else 0
        free_ranges = [(block.address - self.address, block.size) for block in free_blocks]  # runs begin at whole units
        return sum(max((begin + size) // unit - -(-begin // unit), 0) * unit for begin, size in free_ranges)


class SnapshotEvent(NamedTuple):
    """One entry of a device's trace in a snapshot."""

    action: Action
    address: int  # of the block or segment; for OOM, the free bytes of the device
    size: int  # bytes requested, for blocks; bytes of the segment, for segments
    stream: int
    pool_id: PoolId
    time_us: int | None
    frames: Stack


@dataclass(slots=True)
class Snapshot:
    """The content of one snapshot file."""

    segments: list[SnapshotSegment] = field(default_factory=list)
    traces: list[Sequence[SnapshotEvent]] = field(default_factory=list)  # by device
    settings: dict[str, object] = field(default_factory=dict)  # empty in files of torch 2.3 and before
    annotations: list[dict[str, object]] = field(default_factory=list)  # `external_annotations`
    source: str = "measured"  # or simulated, in files that memprof wrote

    @property
    def devices(self) -> list[int]:
        """Return the indices of the devices that have a segment or an event."""
        recording_devices = {device for device, trace in enumerate(self.traces) if trace}
        return sorted(recording_devices | {segment.device for segment in self.segments})
