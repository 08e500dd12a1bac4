"""What a memory snapshot of torch holds (`torch.cuda.memory._dump_snapshot`), as plain records.

Field names follow torch's documentation of the format; sizes are bytes. trace/snapshot_file.py reads the file.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

EXPORT_KEY = "memprof"
"""In a file that memprof wrote, beside torch's own keys: whose run it is (`source`), and memprof's `version`."""


class Frame(NamedTuple):
    """One line of a Python or C++ stack, innermost first in a stack."""

    filename: str
    line: int
    name: str


Stack = tuple[Frame, ...]


class Action(enum.StrEnum):
    """What an event of the trace says."""

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
    """What a block is doing."""

    ALLOCATED = "active_allocated"
    PENDING_FREE = "active_pending_free"
    INACTIVE = "inactive"


class SnapshotBlock(NamedTuple):
    """A block of a segment."""

    address: int
    size: int
    requested: int | None
    """Bytes the program asked for; None in files that do not say."""
    state: BlockState
    frames: Stack


class SnapshotSegment(NamedTuple):
    """A segment; of an expandable one, a contiguous mapped run. Its blocks tile it."""

    device: int
    address: int
    size: int
    stream: int
    is_small: bool
    pool_id: tuple[int, int]
    expandable: bool
    blocks: tuple[SnapshotBlock, ...]
    frames: Stack


class SnapshotEvent(NamedTuple):
    """One entry of a device's trace."""

    action: Action
    address: int
    """Of the block or segment; for OOM, the free bytes of the device."""
    size: int
    """Bytes requested, for blocks; bytes of the segment, for segments."""
    stream: int
    pool_id: tuple[int, int]
    time_us: int | None
    frames: Stack


@dataclass(slots=True)
class Snapshot:
    """A whole snapshot file."""

    segments: list[SnapshotSegment] = field(default_factory=list)
    traces: list[Sequence[SnapshotEvent]] = field(default_factory=list)
    """By device; empty lists where nothing was recorded."""
    settings: dict[str, object] = field(default_factory=dict)
    """`allocator_settings`; empty in files of torch 2.3 and before."""
    annotations: list[dict[str, object]] = field(default_factory=list)
    """`external_annotations`."""
    source: str = "measured"
    """simulated or measured: whose run it is. torch's own files are of measured ones; memprof's exports say it."""

    @property
    def devices(self) -> list[int]:
        """Devices that hold a segment or recorded an event."""
        traced = {device for device, trace in enumerate(self.traces) if trace}
        return sorted(traced | {segment.device for segment in self.segments})
