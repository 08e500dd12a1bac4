"""The result of `memprof analyze`, with the names of its JSON.

Sizes are bytes; events are indices of the device's trace, -1 before the first; unknown values are None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from memprof.allocator.snapshot_replay import ReplayDifference
from memprof.report.documents.base import DisplayedDocument
from memprof.report.frames import RowTable
from memprof.snapshots.occupancy import Fragmentation, Group
from memprof.snapshots.out_of_memory import OutOfMemoryEvent
from memprof.snapshots.steps import Leak
from memprof.snapshots.what_if import ReplayOutcome, WhatIf

SCHEMA = 2  # 2: names (old_names.py)


@dataclass(frozen=True, slots=True)
class AllocatorBytes:
    """Requested, allocated and reserved bytes after an event."""

    event: int
    requested_bytes: int  # Of blocks allocated or freed and still used by other streams (torch's requested_bytes).
    allocated_bytes: int
    reserved_bytes: int
    # Stage of a simulated run, or annotation of a recorded one; None: neither.
    stage: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRow:
    """A block of a segment, with its lifetime and origin."""

    address: int
    allocated_bytes: int
    requested_bytes: int
    born_event: int
    freed_event: int | None
    source: str
    op: str
    module: str
    category: str
    frames: tuple[str, ...]  # The Python lines of its stack, innermost first.
    alike: int = 1  # Blocks with the same size, source line, operator and category, including this one.


@dataclass(frozen=True, slots=True)
class LiveMemory:
    """The blocks live at the requested moment, grouped, and the largest of them."""

    what: str  # peak, end, oom or event.
    amounts: AllocatorBytes
    pending_bytes: int  # Freed by the program, and still used by other streams.
    by: str  # The property by which blocks are grouped: frame, module, category or size.
    groups: tuple[Group, ...]
    blocks: tuple[BlockRow, ...]  # The largest.
    num_groups: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PinnedSegment:
    """A nearly empty segment, with the live blocks that keep the segment from being released."""

    address: int
    size_bytes: int
    used_bytes: int
    largest_free_bytes: int
    pool: str
    stream: int
    expandable: bool
    blocks: tuple[BlockRow, ...]


@dataclass(frozen=True, slots=True)
class FragmentationRow(Fragmentation):
    """Fragmentation at one moment, with the nearly empty segments."""

    nearly_empty: tuple[PinnedSegment, ...]  # The nearly empty segments with the most pinned bytes.


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The training steps recognized in a recording."""

    count: int
    found_by: str  # How the steps were recognized.
    begins: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MissingFrames:
    """The blocks live at the peak that have no stack, whose origin is therefore unknown."""

    count: int
    allocated_bytes: int
    reasons: tuple[str, ...]  # Why stacks are missing, as sentences.


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """Agreement of memprof's simulated allocator with the recording: the block addresses that it reproduces."""

    allocations: int
    identical_addresses: int
    final_layout_identical: bool
    first_difference: ReplayDifference | None


@dataclass(frozen=True, slots=True)
class TimelineColumns:
    """Columns of a chart: the maximum bytes in equal intervals of the recording."""

    events: tuple[int, ...]  # First event of each interval.
    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    seconds: float | None  # Duration of the recording; None: unknown.


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """The analysis of one GPU of a recording."""

    device: int
    events: int
    allocations: int
    state_only: bool  # No events were recorded: only the final state is known.
    start: AllocatorBytes
    peak: AllocatorBytes  # The first event with the highest allocated bytes.
    peak_requested_bytes: int
    peak_reserved_bytes: int
    peak_reserved_event: int
    end: AllocatorBytes
    timeline: TimelineColumns
    moment: LiveMemory
    fragmentation_at_peak: FragmentationRow
    fragmentation_at_end: FragmentationRow
    ooms: tuple[OutOfMemoryEvent, ...]
    steps: StepSummary | None
    leaks: tuple[Leak, ...]
    missing_frames: MissingFrames
    replay: ReplayRow
    what_if: WhatIf | None


@dataclass(frozen=True, slots=True, repr=False)
class Analysis(DisplayedDocument):
    """The result of `memprof analyze`."""

    schema: int
    memprof_version: str
    command: str
    source: str  # measured or simulated.
    file: str
    format: str  # Format of the file, such as `torch snapshot`.
    settings: str  # Allocator settings, as the file gives them.
    devices: tuple[DeviceReport, ...]
    replay: ReplayRow  # Summed over all devices.
    assumptions: tuple[str, ...]

    @property
    def ran_out(self) -> bool:
        """Return whether the recording has an out-of-memory error."""
        return any(device.ooms for device in self.devices)

    def tables(self) -> dict[str, RowTable]:
        """Return the tables by name; the first column of every table is the index of the device."""

        def make_table(
            list_rows: Callable[[DeviceReport], Iterable[Any]], row_type: type | None = None, **key_columns: type
        ) -> RowTable:
            rows = ((d.device, *row) if key_columns else (d.device, row) for d in self.devices for row in list_rows(d))
            return RowTable(rows, row_type, {"device": int, **key_columns})

        def list_fragmentation(device: DeviceReport) -> list[tuple[str, FragmentationRow]]:
            return [("peak", device.fragmentation_at_peak), ("end", device.fragmentation_at_end)]

        def list_timeline_rows(device: DeviceReport) -> Iterable[tuple[int, int, int]]:
            timeline = device.timeline
            return zip(timeline.events, timeline.allocated_bytes, timeline.reserved_bytes, strict=True)

        return {
            "amounts": make_table(
                lambda d: (("start", d.start), ("peak", d.peak), ("end", d.end)), AllocatorBytes, moment=str
            ),
            "timeline": make_table(list_timeline_rows, event=int, allocated_bytes=int, reserved_bytes=int),
            "groups": make_table(lambda device: device.moment.groups, Group),
            "blocks": make_table(lambda device: device.moment.blocks, BlockRow),
            "fragmentation": make_table(list_fragmentation, FragmentationRow, moment=str),
            "nearly_empty": make_table(
                lambda d: [(moment, segment) for moment, row in list_fragmentation(d) for segment in row.nearly_empty],
                PinnedSegment,
                moment=str,
            ),
            "ooms": make_table(lambda device: device.ooms, OutOfMemoryEvent),
            "leaks": make_table(lambda device: device.leaks, Leak),
            "what_if": make_table(
                lambda d: [("before", d.what_if.before), ("after", d.what_if.after)] if d.what_if else [],
                ReplayOutcome,
                run=str,
            ),
        }
