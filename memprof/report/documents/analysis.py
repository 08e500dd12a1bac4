"""The typed document of `memprof analyze`: what a recording says, with the names that its JSON has.

All sizes are integer bytes; events are indices of the device's trace, -1 before its first. What is not known is None.
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
    requested_bytes: int  # Asked for, of blocks in use or waiting for other streams (torch's requested_bytes).
    allocated_bytes: int
    reserved_bytes: int
    # What was being done: a stage of a simulated run, an annotation of a recorded one; else None.
    stage: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRow:
    """One block."""

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
    alike: int = 1  # Blocks of this size, line, operator and category, of which it is one.


@dataclass(frozen=True, slots=True)
class LiveMoment:
    """The blocks that are live at the moment that was requested."""

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
    """A nearly empty segment, and the live blocks that keep it."""

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
    """The fragmentation at one moment."""

    nearly_empty: tuple[PinnedSegment, ...]  # Of them, those with the most pinned bytes.


@dataclass(frozen=True, slots=True)
class StepsRow:
    """The steps that were recognised."""

    count: int
    found_by: str
    begins: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MissingFrames:
    """Blocks of which nothing says who made them."""

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
    """The highest values of equal stretches of the recording, for a picture."""

    events: tuple[int, ...]  # Where each stretch begins.
    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    seconds: float | None


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device."""

    device: int
    events: int
    allocations: int
    state_only: bool  # No events were recorded: only the state at the end is known.
    start: Amounts
    peak: Amounts  # The first event at which most is allocated.
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
    """The whole document."""

    schema: int
    memprof_version: str
    command: str
    source: str  # measured or simulated.
    file: str
    format: str
    settings: str  # The allocator's, as the file gives them.
    devices: tuple[DeviceReport, ...]
    replay: ReplayRow  # Of all devices together.
    assumptions: tuple[str, ...]

    @property
    def ran_out(self) -> bool:
        """Return whether the recording holds an out-of-memory error."""
        return any(device.ooms for device in self.devices)

    def tables(self) -> dict[str, RowTable]:
        """Return what was held, by whom, and what went wrong, as rows that begin with their device."""

        def of(rows: Callable[[DeviceReport], Iterable[Any]], row: type | None = None, **before: type) -> RowTable:
            found = ((d.device, *one) if before else (d.device, one) for d in self.devices for one in rows(d))
            return RowTable(found, row, {"device": int, **before})

        def at_ends(device: DeviceReport) -> list[tuple[str, FragmentationRow]]:
            return [("peak", device.fragmentation_at_peak), ("end", device.fragmentation_at_end)]

        def over_time(device: DeviceReport) -> Iterable[tuple[int, int, int]]:
            line = device.timeline
            return zip(line.events, line.allocated_bytes, line.reserved_bytes, strict=True)

        return {
            "amounts": of(lambda d: (("start", d.start), ("peak", d.peak), ("end", d.end)), Amounts, moment=str),
            "timeline": of(over_time, event=int, allocated_bytes=int, reserved_bytes=int),
            "groups": of(lambda device: device.moment.groups, Group),
            "blocks": of(lambda device: device.moment.blocks, BlockRow),
            "fragmentation": of(at_ends, FragmentationRow, moment=str),
            "nearly_empty": of(
                lambda d: [(moment, one) for moment, row in at_ends(d) for one in row.nearly_empty],
                PinnedSegment,
                moment=str,
            ),
            "ooms": of(lambda device: device.ooms, OutOfMemoryEvent),
            "leaks": of(lambda device: device.leaks, Leak),
            "what_if": of(
                lambda d: [("before", d.what_if.before), ("after", d.what_if.after)] if d.what_if else [],
                ReplayOutcome,
                run=str,
            ),
        }
