"""The typed document of `memprof analyze`: the contents of a recording, under the names of its JSON.

All sizes are integer bytes; events are indices of the device's trace, -1 before its first. Unknown values are None.
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
class Amounts:
    """The bytes that the allocator held after an event."""

    event: int
    requested_bytes: int  # Of blocks in use or waiting for other streams (torch's requested_bytes).
    allocated_bytes: int
    reserved_bytes: int
    # The current stage of a simulated run, or annotation of a recorded one; None: neither.
    stage: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRow:
    """One block of a segment."""

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
    alike: int = 1  # Number of blocks with this size, line, operator and category, this one included.


@dataclass(frozen=True, slots=True)
class LiveMoment:
    """The live blocks at the requested moment."""

    what: str  # peak, end, oom or event.
    amounts: Amounts
    pending_bytes: int  # Freed by the program, and waiting for other streams.
    by: str
    groups: tuple[Group, ...]
    blocks: tuple[BlockRow, ...]  # The largest.
    num_groups: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PinnedSegment:
    """A nearly empty segment, and the live blocks that keep it from being released."""

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
    """The fragmentation at one moment, with nearly empty segments."""

    nearly_empty: tuple[PinnedSegment, ...]  # The nearly empty segments with the most pinned bytes.


@dataclass(frozen=True, slots=True)
class StepsRow:
    """The recognised steps."""

    count: int
    found_by: str
    begins: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MissingFrames:
    """Blocks without a stack, so that their origin is unknown."""

    count: int
    allocated_bytes: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """The agreement of memprof's allocator with the recording's addresses."""

    allocations: int
    identical_addresses: int
    final_layout_identical: bool
    first_difference: ReplayDifference | None


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """The highest values in equal stretches of the recording, for a chart."""

    events: tuple[int, ...]  # Where each stretch begins.
    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    seconds: float | None


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """The analysis of one device."""

    device: int
    events: int
    allocations: int
    state_only: bool  # No events were recorded: only the final state is known.
    start: Amounts
    peak: Amounts  # The first event with the highest allocated bytes.
    peak_requested_bytes: int
    peak_reserved_bytes: int
    peak_reserved_event: int
    end: Amounts
    timeline: TimelineRow
    moment: LiveMoment
    fragmentation_at_peak: FragmentationRow
    fragmentation_at_end: FragmentationRow
    ooms: tuple[OutOfMemoryEvent, ...]
    steps: StepsRow | None
    leaks: tuple[Leak, ...]
    missing_frames: MissingFrames
    replay: ReplayRow
    what_if: WhatIf | None


@dataclass(frozen=True, slots=True, repr=False)
class Analysis(DisplayedDocument):
    """The whole document of `memprof analyze`."""

    schema: int
    memprof_version: str
    command: str
    source: str  # measured or simulated.
    file: str
    format: str
    settings: str  # The allocator's, as the file gives them.
    devices: tuple[DeviceReport, ...]
    replay: ReplayRow  # Summed over all devices.
    assumptions: tuple[str, ...]

    @property
    def ran_out(self) -> bool:
        """Return whether the recording holds an out-of-memory error."""
        return any(device.ooms for device in self.devices)

    def tables(self) -> dict[str, RowTable]:
        """Return the tables of the document; each row begins with its device."""

        def make_table(
            rows: Callable[[DeviceReport], Iterable[Any]], row: type | None = None, **before: type
        ) -> RowTable:
            found = ((d.device, *one) if before else (d.device, one) for d in self.devices for one in rows(d))
            return RowTable(found, row, {"device": int, **before})

        def fragmentation_rows(device: DeviceReport) -> list[tuple[str, FragmentationRow]]:
            return [("peak", device.fragmentation_at_peak), ("end", device.fragmentation_at_end)]

        def over_time(device: DeviceReport) -> Iterable[tuple[int, int, int]]:
            line = device.timeline
            return zip(line.events, line.allocated_bytes, line.reserved_bytes, strict=True)

        return {
            "amounts": make_table(
                lambda d: (("start", d.start), ("peak", d.peak), ("end", d.end)), Amounts, moment=str
            ),
            "timeline": make_table(over_time, event=int, allocated_bytes=int, reserved_bytes=int),
            "groups": make_table(lambda device: device.moment.groups, Group),
            "blocks": make_table(lambda device: device.moment.blocks, BlockRow),
            "fragmentation": make_table(fragmentation_rows, FragmentationRow, moment=str),
            "nearly_empty": make_table(
                lambda d: [(moment, one) for moment, row in fragmentation_rows(d) for one in row.nearly_empty],
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
