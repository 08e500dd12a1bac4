"""The whole result of `memprof analyze` as text for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memprof.report.documents.analysis import (
    AllocatorBytes,
    Analysis,
    BlockRow,
    DeviceReport,
    FragmentationRow,
    PinnedSegment,
    ReplayRow,
)
from memprof.report.terminal.cells import choose_unit, draw_curve, format_block_life, format_source
from memprof.report.terminal.console import dim, make_heading, make_section, make_table
from memprof.report.terminal.next_step import choose_step_after_analyze, render_next_step
from memprof.snapshots.what_if import WhatIf
from memprof.units import format_bytes

MAX_PINNED_SEGMENTS = 5  # Kinds of nearly empty segments that are shown.
_TITLES = {"peak": "At the peak", "end": "At the end", "oom": "At the out-of-memory error", "event": "After the event"}
_LABEL_WIDTH = 11  # Columns before a curve.
_SCALE_WIDTH = 14  # Columns after a curve.
_FRAGMENTATION_FIELDS = {
    "reserved, not in use": "free_bytes",
    "  wholly free segments: empty_cache() returns them": "releasable_bytes",
    "  pinned by live blocks in the same segments": "pinned_bytes",
    "largest free block": "largest_free_bytes",
    "in use, but not requested (rounding)": "rounding_bytes",
}
_MODULE_WIDTH = 28  # Maximum columns of a module path beside a source line.


def render(
    document: Analysis, *, replay: bool = False, quiet: bool = False, file: Path | None = None
) -> RenderableType:
    """Return the whole analysis for a terminal; `replay` adds how many recorded addresses the simulated allocator
    reproduces.

    `file` (the analyzed file) adds the command to try next; `quiet` leaves only the answer for each device.
    """
    if quiet:
        return Group(*(answer for device in document.devices for answer in render_answer(device)))
    parts: list[RenderableType] = [render_title(document)]
    has_several = len(document.devices) > 1
    parts += [_render_device(device, replay=replay, has_several=has_several) for device in document.devices]
    parts += [dim(f"Note: {sentence}") for sentence in document.assumptions]
    return Group(*parts, *([] if file is None else render_next_step(choose_step_after_analyze(document, file))))


def render_title(document: Analysis) -> Text:
    """Return the name and the kind of the file, with its allocator settings."""
    title = make_heading("memprof analyze: ", f"{document.file}, a {document.format}")
    if document.settings:
        title.append(f" ({document.settings})", style="dim")
    return title


def render_answer(device: DeviceReport) -> Iterator[Text]:
    """Yield the answer for one device: its peak, where it ran out of memory, and the largest growth."""
    held = device.end if device.state_only else device.peak
    sizes = f"{format_bytes(held.allocated_bytes)} allocated, {format_bytes(held.reserved_bytes)} reserved"
    when = "when the snapshot was taken" if device.state_only else _format_moment(device, held)
    yield Text(f"Device {device.device}: ", style="bold").append(
        f"{'' if device.state_only else 'peak of '}{sizes} ({when}).", style="default"
    )
    for oom in device.ooms[:1]:
        times = f" {len(device.ooms)} times, first" if len(device.ooms) > 1 else ""
        yield Text(f"Ran out of memory{times} ", style="bold red").append(
            f"at event {oom.event:,}{f', in {format_source(oom.source)}' if ':' in oom.source else ''}.",
            style="default",
        )
    for leak in device.leaks[:1]:
        growth = f"by {format_bytes(leak.per_step_bytes)} a step, allocated in {format_source(leak.source)}"
        others = f", and {len(device.leaks) - 1} more" if len(device.leaks) > 1 else ""
        yield Text("Memory grows ", style="bold yellow").append(f"{growth}{others}.", style="default")


def _render_device(device: DeviceReport, *, replay: bool, has_several: bool) -> RenderableType:
    parts: list[RenderableType] = [Text(f"\nDevice {device.device}", style="bold underline")] if has_several else []
    parts.append(_render_summary(device))
    if len(device.timeline.events) > 1:
        parts.append(MemoryCurves(device))
    for oom in device.ooms:
        title = Text(f"\nOut of memory at event {oom.event:,}", style="bold red")
        parts += [title.append(f" in {format_source(oom.source)}", style="default"), render_bullets(oom.reasons)]
    parts.append(render_live_memory(device))
    if device.moment.blocks:
        parts.append(_render_blocks(device))
    parts.append(_render_fragmentation(device))
    if not device.state_only:
        parts.append(_render_leaks(device))
    if (missing := device.missing_frames).reasons:
        note = f": {format_bytes(missing.allocated_bytes)} of the peak say nothing of who made them"
        parts += [make_heading("\nFrames missing", note if missing.count else ""), render_bullets(missing.reasons)]
    if replay:
        parts.append(render_replay(device.replay))
    if device.what_if is not None:
        parts.append(render_what_if(device.what_if))
    return Group(*parts)


def format_event(device: DeviceReport, event: int) -> str:
    """Return the number of an event, or what stands for it where there is none."""
    if device.state_only:
        return "now"
    if event < 0:
        return "before the first event"
    return f"event {event:,}"


def _format_moment(device: DeviceReport, amounts: AllocatorBytes) -> str:
    where = format_event(device, amounts.event)
    return f"{where}, in {amounts.stage}" if amounts.stage else where


def _render_summary(device: DeviceReport) -> RenderableType:
    table = make_table("", ">requested", ">allocated", ">reserved", "~when", ruled=True)
    rows = [("start", device.start), ("peak", device.peak), ("end", device.end)]
    for name, amounts in rows[2:] if device.state_only else rows:
        style = "bold" if name == "peak" else ""
        cells = (amounts.requested_bytes, amounts.allocated_bytes, amounts.reserved_bytes)
        table.add_row(name, *map(format_bytes, cells), _format_moment(device, amounts), style=style)
    if device.peak_reserved_bytes > device.peak.reserved_bytes and not device.state_only:
        where = format_event(device, device.peak_reserved_event)
        table.add_row("most reserved", "", "", format_bytes(device.peak_reserved_bytes), where)
    if device.state_only:
        return Group(table, dim("No events were recorded: this is the state when the snapshot was taken."))
    counts_text = f"{device.events:,} events, {device.allocations:,} allocations"
    if device.timeline.seconds is not None:
        counts_text += f", {device.timeline.seconds:,.2f} s"
    if device.steps is not None:
        counts_text += f"; {device.steps.count} steps, seen from {device.steps.found_by}"
    return Group(table, dim(counts_text + "."))


@dataclass(frozen=True)
class MemoryCurves:
    """Curves of allocated and reserved bytes over the recording, as wide as the console."""

    device: DeviceReport

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        timeline = self.device.timeline
        columns = max(min(options.max_width - _LABEL_WIDTH - _SCALE_WIDTH, len(timeline.events)), 1)
        highest = max((*timeline.reserved_bytes, *timeline.allocated_bytes, 1))
        yield Text("")
        for name, values in (("allocated", timeline.allocated_bytes), ("reserved", timeline.reserved_bytes)):
            yield Text(f"{name:<{_LABEL_WIDTH}}{_draw_curve(values, columns, highest)}  {format_bytes(max(values))}")
        yield dim(f"{'':<{_LABEL_WIDTH}}{_draw_marks(self.device, columns)}")
        legend = "^ the peak" + ("; ! out of memory; ‼ both" if self.device.ooms else "")
        yield dim(f"{'':<{_LABEL_WIDTH}}{legend}")


def _draw_marks(device: DeviceReport, columns: int) -> str:
    marks = [" "] * columns
    for event, mark in [*((oom.event, "!") for oom in device.ooms), (device.peak.event, "^")]:
        if event >= 0:
            column = min(event * columns // device.events, columns - 1)
            marks[column] = mark if marks[column] == " " else "‼"
    return "".join(marks).rstrip()


def _draw_curve(values: tuple[int, ...], columns: int, highest: int) -> str:
    begins = [len(values) * column // columns for column in range(columns + 1)]
    return draw_curve((max(values[begin : max(end, begin + 1)]) for begin, end in pairwise(begins)), highest)


def render_live_memory(device: DeviceReport) -> RenderableType:
    """Return a table of the blocks that are live at the requested moment, by what allocated them."""
    moment = device.moment
    amounts = moment.amounts
    name = "When the snapshot was taken" if device.state_only else _TITLES[moment.what]
    heading = f"{format_bytes(amounts.allocated_bytes)} in {moment.num_blocks:,} blocks, by {moment.by}"
    if moment.pending_bytes:
        heading += f"; {format_bytes(moment.pending_bytes)} more freed and waiting for other streams"
    unit = choose_unit(amounts.allocated_bytes, min_unit_bytes=1)
    headers = [f">{unit.name}", ">share", ">blocks", *(["|category"] if moment.by != "category" else [])]
    shows_module = moment.by in ("frame", "size", "category")
    module_header = "mostly" if moment.by != "frame" else "in module"
    headers += [f"~{moment.by}", *([f"~{module_header}"] * shows_module)]
    table = make_table(*headers, optional=(module_header, "category", "share", "blocks"))
    total_bytes = amounts.allocated_bytes + moment.pending_bytes or 1
    for row in moment.groups:
        cells = [unit.format(row.allocated_bytes), f"{row.allocated_bytes / total_bytes:.1%}", f"{row.count:,}"]
        if moment.by != "category":
            cells.append(row.category)
        key = format_source(row.key) if moment.by == "frame" else row.key
        if row.op and moment.by == "frame" and row.op not in key:
            key += f"  {row.op.removeprefix('aten.')}"
        cells.append(key)
        if shows_module:
            cells.append("" if row.module == row.key else _shorten_module(row.module))
        table.add_row(*cells)
    parts: list[RenderableType] = [
        make_section(make_heading(f"\n{name} ({_format_moment(device, amounts)}): ", heading), table)
    ]
    if moment.num_groups > len(moment.groups):
        rest = amounts.allocated_bytes + moment.pending_bytes - sum(row.allocated_bytes for row in moment.groups)
        num_hidden = moment.num_groups - len(moment.groups)
        parts.append(dim(f"  and {format_bytes(rest)} in {num_hidden:,} more groups (--top)"))
    return Group(*parts)


def _render_blocks(device: DeviceReport) -> RenderableType:
    blocks = device.moment.blocks
    unit = choose_unit(blocks[0].allocated_bytes, min_unit_bytes=1)
    table = make_table(f">{unit.name}", ">x", "|life in events", "~what it is", optional=("life in events", "x"))
    for block in _drop_equal_blocks(blocks):
        life = format_block_life(block) if block.alike == 1 else f"{format_block_life(block).split(' ')[0]}, …"
        table.add_row(unit.format(block.allocated_bytes), f"{block.alike:,}", life, _format_block(block))
    return make_section("\nLargest blocks", table)


def _drop_equal_blocks(blocks: tuple[BlockRow, ...]) -> list[BlockRow]:
    """Return the first block of each size, source line, operator and category."""
    unique: dict[tuple[object, ...], BlockRow] = {}
    for block in blocks:
        unique.setdefault((block.allocated_bytes, block.source, block.op, block.category), block)
    return list(unique.values())


def _format_block(block: BlockRow) -> Text:
    text = Text(block.category)
    text.append(f" {format_source(block.source)}")
    if block.op and block.op not in block.source:
        text.append(f" {block.op.removeprefix('aten.')}", style="dim")
    return text


def _render_fragmentation(device: DeviceReport) -> RenderableType:
    at_peak, at_end = device.fragmentation_at_peak, device.fragmentation_at_end
    one_moment = at_peak.event == at_end.event or device.state_only
    moments = [("", at_end)] if one_moment else [("at the peak", at_peak), ("at the end", at_end)]
    table = make_table("", *(f">{name}" for name, _ in moments))
    table.show_header = not one_moment
    for label, field in _FRAGMENTATION_FIELDS.items():
        table.add_row(label, *(format_bytes(getattr(row, field)) for _, row in moments))
    parts: list[RenderableType] = [make_section("\nFragmentation", table)]
    shown_row = at_peak if at_peak.nearly_empty else at_end
    if shown_row.nearly_empty:
        parts.append(
            _render_segments(shown_row, "" if one_moment else " at the peak" if shown_row is at_peak else " at the end")
        )
    return Group(*parts)


def _render_segments(row: FragmentationRow, suffix: str) -> RenderableType:
    counts = Counter(_format_segment(segment) for segment in row.nearly_empty)
    most_common = counts.most_common()[:MAX_PINNED_SEGMENTS]
    lines = [f"{f'{count} x ' if count > 1 else ''}{line}" for line, count in most_common]
    num_hidden = row.nearly_empty_segments - sum(count for _, count in most_common)
    lines += [f"and {num_hidden:,} more"] if num_hidden else []
    return Group(Text(f"  Nearly empty segments{suffix}, and what keeps them:"), render_bullets(lines, indent=4))


def render_bullets(sentences: Sequence[str], indent: int = 2) -> RenderableType:
    """Return sentences as a bulleted list, indented by `indent` columns."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    for sentence in sentences:
        grid.add_row("-", sentence)
    return Padding(grid, (0, 0, 0, indent))


def _format_segment(segment: PinnedSegment) -> str:
    blocks = _drop_equal_blocks(segment.blocks)[:3]
    block_texts = (
        f"{format_bytes(block.allocated_bytes)}{f' x{block.alike:,}' * (block.alike > 1)} {format_source(block.source)}"
        for block in blocks
    )
    named_bytes = sum(block.allocated_bytes * block.alike for block in blocks)
    text = f"{format_bytes(segment.size_bytes)} ({segment.pool}), {format_bytes(segment.used_bytes)} in use: "
    return text + "; ".join(block_texts) + ("; …" if named_bytes < segment.used_bytes else "")


def _render_leaks(device: DeviceReport) -> RenderableType:
    if device.steps is None:
        return Text("\nLeaks: not looked for, as fewer than three steps can be told apart.", style="dim")
    if not device.leaks:
        return Text(f"\nLeaks: none; nothing piles up over the {device.steps.count} steps.")
    lines = (
        f"  {format_bytes(leak.per_step_bytes)} per step, {format_bytes(leak.allocated_bytes)} in "
        f"{leak.count:,} blocks: {format_source(leak.source)} {leak.op.removeprefix('aten.')}".rstrip()
        for leak in device.leaks
    )
    title = Text("\nLeaks: what steps leave behind and nothing frees", style="bold yellow")
    return Group(title, *map(Text, lines))


def render_replay(replay: ReplayRow) -> RenderableType:
    """Return how many recorded addresses the simulated allocator reproduces, and the first that differs."""
    layout = "identical" if replay.final_layout_identical else "different"
    identical = f"{replay.identical_addresses:,} of {replay.allocations:,} addresses identical"
    title = make_heading("\nReplay: ", f"{identical}, final layout {layout}")
    difference = replay.first_difference
    if difference is None:
        return title
    reason = difference.reason or "nothing in the file explains it"
    return Group(title, Text(f"  first difference at event {difference.event:,}: {difference.problem}; {reason}"))


def render_what_if(result: WhatIf) -> RenderableType:
    """Return what the recorded requests reserve with other allocator settings."""
    optional = ("segments", "reserved at the end")
    table = make_table("~settings", ">peak reserved", ">reserved at the end", ">segments", optional=optional)
    for outcome, note in ((result.before, " (as recorded)"), (result.after, "")):
        sizes = format_bytes(outcome.peak_reserved_bytes), format_bytes(outcome.final_reserved_bytes)
        table.add_row(outcome.settings + note, *sizes, f"{outcome.final_segments:,}")
    saved = result.saved_bytes
    change = f"{'saves' if saved > 0 else 'costs'} {format_bytes(abs(saved))}" if saved else "changes nothing"
    notes = [Text(f"  It {change} of the peak.")]
    if result.before.peak_reserved_bytes != result.recorded_peak_reserved_bytes:
        text = f"  Recorded were {format_bytes(result.recorded_peak_reserved_bytes)}: what was cached before the "
        notes.append(dim(f"{text}recording began is not known, so both replays begin with the live blocks alone."))
    if result.failed_allocations:
        notes.append(dim(f"  Requests that were refused ({result.failed_allocations}) are left out of both."))
    return Group(make_section("\nWhat if: the same requests", table), *notes)


def _shorten_module(module: str) -> str:
    """Return the last part of a module path that fits its column, or the last three links of an `a > b` chain."""
    if len(module) > _MODULE_WIDTH and " > " not in module and not module.startswith("("):
        last_parts: list[str] = []
        for part in reversed(module.split(".")):
            if last_parts and len(".".join((part, *last_parts))) > _MODULE_WIDTH:
                break
            last_parts.insert(0, part)
        return "…" + ".".join(last_parts)
    parts = module.split(" > ")
    return " > ".join(parts if len(parts) <= 3 else ["…", *parts[-3:]])
