"""Construction of the result of `memprof analyze` from recordings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from memprof.allocator import AllocatorConfig
from memprof.allocator.pools import pool_name
from memprof.errors import UsageError
from memprof.report.documents import analysis
from memprof.snapshots.occupancy import GROUP_KEYS, SegmentUse, group_blocks, measure_fragmentation
from memprof.snapshots.origins import NO_FRAMES
from memprof.snapshots.out_of_memory import find_out_of_memory_events
from memprof.snapshots.recording import BEFORE, NEVER, BlockLife, Recording
from memprof.snapshots.steps import find_leaks
from memprof.snapshots.what_if import what_if
from memprof.trace.columns import ALLOC, OOM, SNAPSHOT
from memprof.units import format_bytes
from memprof.version import __version__

TIMELINE_COLUMNS = 100
MAX_FRAMES = 8
MAX_BLOCKS_PER_SEGMENT = 5  # Blocks named per nearly empty segment.


@dataclass(frozen=True, slots=True)
class AnalysisRequest:
    """The options of `memprof analyze`: moment, grouping, number of rows, and allocator settings to replay."""

    at: str = "peak"  # peak, end, oom or the number of an event.
    by: str = "frame"  # The property by which blocks are grouped.
    top: int = 10  # Maximum rows of a table.
    what_if: AllocatorConfig | None = None  # Settings under which the requests are replayed; None: no replay.


@dataclass(frozen=True, slots=True)
class RecordingOrigin:
    """The file that recordings were read from: path, format, source, allocator settings and assumptions."""

    file: str
    format: str
    source: str
    settings: str
    assumptions: tuple[str, ...] = ()


def build_analysis(
    recordings: Sequence[Recording], origin: RecordingOrigin, request: AnalysisRequest
) -> analysis.Analysis:
    """Return the analysis of `recordings`. Raises UsageError: the requested moment does not exist."""
    devices = tuple(_build_device(recording, request) for recording in recordings)
    return analysis.Analysis(
        schema=analysis.SCHEMA,
        memprof_version=__version__,
        command="analyze",
        **{origin_field.name: getattr(origin, origin_field.name) for origin_field in fields(origin)},
        devices=devices,
        replay=analysis.ReplayRow(
            allocations=sum(device.replay.allocations for device in devices),
            identical_addresses=sum(device.replay.identical_addresses for device in devices),
            final_layout_identical=all(device.replay.final_layout_identical for device in devices),
            first_difference=next((d.replay.first_difference for d in devices if d.replay.first_difference), None),
        ),
    )


def _build_device(recording: Recording, request: AnalysisRequest) -> analysis.DeviceReport:
    steps = recording.steps
    peak = recording.peak()[1]
    peak_reserved, reserved_event = recording.peak("reserved")
    replay = recording.replay
    return analysis.DeviceReport(
        device=recording.device,
        events=len(recording.events),
        allocations=replay.allocations,
        state_only=recording.events.actions.count(SNAPSHOT) == len(recording.events),
        start=_build_amounts(recording, BEFORE),
        peak=_build_amounts(recording, peak),
        peak_requested_bytes=recording.peak("requested")[0],
        peak_reserved_bytes=peak_reserved,
        peak_reserved_event=reserved_event,
        end=_build_amounts(recording, recording.end),
        timeline=_build_timeline(recording),
        moment=_build_moment(recording, request),
        fragmentation_at_peak=_build_fragmentation(recording, peak, request.top),
        fragmentation_at_end=_build_fragmentation(recording, recording.end, request.top),
        ooms=tuple(find_out_of_memory_events(recording)),
        steps=None if steps is None else analysis.StepSummary(len(steps.begins), steps.found_by, steps.begins),
        leaks=() if steps is None else tuple(find_leaks(recording, steps)),
        missing_frames=_find_missing_frames(recording, peak),
        replay=analysis.ReplayRow(**{row.name: getattr(replay, row.name) for row in fields(analysis.ReplayRow)}),
        what_if=None if request.what_if is None else what_if(recording, request.what_if),
    )


def _build_amounts(recording: Recording, event: int) -> analysis.AllocatorBytes:
    stage = next((name for name, begin, end in reversed(recording.stages) if begin <= event < end), None)
    return analysis.AllocatorBytes(event, *recording.at(event), stage)


def find_moment(recording: Recording, at: str) -> tuple[str, int]:
    """Return kind (peak, end, oom or event) and event index of the moment `at`. Raises UsageError: no such moment."""
    if at == "peak":
        return at, recording.peak()[1]
    if at == "end":
        return at, recording.end
    if at == "oom":
        oom_events = recording.events.find_indices(OOM)
        if not oom_events:
            problem = f"the recording of device {recording.device} holds no out-of-memory error"
            raise UsageError(problem, value="--at oom", hint="--at peak or --at end; --device chooses another device")
        return at, oom_events[0]
    try:
        event = int(at)
    except ValueError:
        hint = "peak, end, oom or the number of an event"
        raise UsageError("no such moment", value=f"--at {at}", hint=hint) from None
    if not BEFORE <= event <= recording.end:
        hint = f"-1 (before the first) to {recording.end}"
        raise UsageError(f"device {recording.device} has no such event", value=f"--at {event}", hint=hint)
    return "event", event


def _build_moment(recording: Recording, request: AnalysisRequest) -> analysis.LiveMemory:
    assert request.by in GROUP_KEYS
    what, event = find_moment(recording, request.at)
    live_blocks = recording.alive(event)
    groups = group_blocks(live_blocks, request.by)
    return analysis.LiveMemory(
        what=what,
        amounts=_build_amounts(recording, event),
        pending_bytes=sum(block.size for block in live_blocks if block.freed <= event),
        by=request.by,
        groups=tuple(groups[: request.top]),
        blocks=_build_largest_blocks(live_blocks, request.top),
        num_groups=len(groups),
        num_blocks=len(live_blocks),
    )


def _build_largest_blocks(blocks: Sequence[BlockLife], max_blocks: int) -> tuple[analysis.BlockRow, ...]:
    counts = Counter(_make_block_key(block) for block in blocks)
    largest = sorted(blocks, key=lambda block: (-block.size, block.born, block.address))
    return tuple(_build_block(block, counts[_make_block_key(block)]) for block in largest[:max_blocks])


def _make_block_key(block: BlockLife) -> tuple[object, ...]:
    return block.size, block.origin.source, block.origin.op, block.category


def _build_block(block: BlockLife, num_alike: int) -> analysis.BlockRow:
    lines = [f"{frame.filename}:{frame.line} {frame.name}" for frame in block.stack if frame.filename.endswith(".py")]
    return analysis.BlockRow(
        address=block.address,
        allocated_bytes=block.size,
        requested_bytes=block.requested,
        born_event=block.born,
        freed_event=None if block.freed == NEVER else block.freed,
        source=block.origin.source,
        op=block.origin.op,
        module=block.origin.module,
        category=block.category.value,
        frames=tuple(lines[:MAX_FRAMES]),
        alike=num_alike,
    )


def _build_fragmentation(recording: Recording, event: int, max_segments: int) -> analysis.FragmentationRow:
    summary, segments = measure_fragmentation(recording, event)
    nearly_empty = [_build_pinned_segment(segment) for segment in segments if segment.is_nearly_empty]
    return analysis.FragmentationRow(**asdict(summary), nearly_empty=tuple(nearly_empty[:max_segments]))


def _build_pinned_segment(segment: SegmentUse) -> analysis.PinnedSegment:
    return analysis.PinnedSegment(
        address=segment.address,
        size_bytes=segment.size,
        used_bytes=segment.used,
        largest_free_bytes=segment.largest_free,
        pool=pool_name(segment.is_small, segment.pool_id),
        stream=segment.stream,
        expandable=segment.expandable,
        blocks=_build_largest_blocks(segment.live, MAX_BLOCKS_PER_SEGMENT),
    )


def _build_timeline(recording: Recording) -> analysis.TimelineColumns:
    num_events = len(recording.events)
    num_columns = min(TIMELINE_COLUMNS, num_events)
    begins = [num_events * i // num_columns for i in range(num_columns)]
    ends = [*begins[1:], num_events][:num_columns]
    times = [time for time in recording.events.times if time > 0]
    return analysis.TimelineColumns(
        events=tuple(begins),
        allocated_bytes=tuple(max(recording.allocated[begin:end]) for begin, end in zip(begins, ends, strict=True)),
        reserved_bytes=tuple(max(recording.reserved[begin:end]) for begin, end in zip(begins, ends, strict=True)),
        seconds=(times[-1] - times[0]) / 1e6 if times and not recording.exact_origins else None,
    )


def _find_missing_frames(recording: Recording, peak_event: int) -> analysis.MissingFrames:
    """Return number and bytes of the blocks live at `peak_event` that have no stack, and why they have none."""
    if recording.exact_origins:
        return analysis.MissingFrames(0, 0, ())
    blocks = [block for block in recording.alive(peak_event) if block.origin.source == NO_FRAMES]
    old = [block for block in blocks if block.born == BEFORE]
    reasons, events = [], recording.events
    if old:
        size = f"{format_bytes(sum(block.size for block in old))} in {len(old):,} blocks are older than the recording"
        reasons.append(f"{size}: call torch.cuda.memory._record_memory_history() before the model is made")
    if len(blocks) > len(old):
        has_stacks = any(action == ALLOC and stack for action, stack in zip(events.actions, events.stacks, strict=True))
        reasons.append(
            "the stacks of some events are empty: they were allocated in a thread without Python and C++ stacks were "
            "not recorded (stacks='all' records them)"
            if has_stacks
            else "no event has a stack: record with context='all' (the default), not with None or 'state'"
        )
    earlier_blocks = [block for block in recording.lives if block.born == BEFORE and block.stack]
    if earlier_blocks and events.actions.count(SNAPSHOT) < len(events):
        count_text = f"{len(earlier_blocks):,} blocks are from before the first event ({len(events):,} are kept)"
        reason = "the ring buffer was full (raise max_entries), or the history was started again"
        reasons.append(f"{count_text}: {reason}")
    if recording.unmatched_events:
        reasons.append(
            f"{recording.unmatched_events:,} events do not fit to what went before: parts of the trace are lost"
        )
    return analysis.MissingFrames(len(blocks), sum(block.size for block in blocks), tuple(reasons))
