"""The document of `memprof analyze` as text for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memprof.report.documents.analysis import (
    Amounts,
    Analysis,
    BlockRow,
    DeviceReport,
    FragmentationRow,
    PinnedSegment,
    ReplayRow,
)
from memprof.report.terminal.cells import block_life, curve, source_text, unit_for
from memprof.report.terminal.console import dim, heading, section, table
from memprof.report.terminal.next_step import after_analysis, render_next
from memprof.snapshots.what_if import WhatIf
from memprof.units import format_bytes

MAX_PINS = 5  # Kinds of nearly empty segments that are shown.
_MOMENTS = {"peak": "At the peak", "end": "At the end", "oom": "At the out-of-memory error", "event": "After the event"}
_LABEL = 11  # Columns before a curve.
_SCALE = 14  # Columns behind it.
_FRAGMENTATION = {
    "reserved, not in use": "free_bytes",
    "  wholly free segments: empty_cache() returns them": "releasable_bytes",
    "  pinned by live blocks in the same segments": "pinned_bytes",
    "largest free block": "largest_free_bytes",
    "in use, but not requested (rounding)": "rounding_bytes",
}
_PATH = 28  # Columns of a module's path beside a source line.


def view(document: Analysis, *, replay: bool = False, quiet: bool = False, file: Path | None = None) -> RenderableType:
    """Return the whole document; with `replay`, also the agreement of the allocator's replay with the recording.

    With `file`, the analyzed file, the command to try next; with `quiet`, only the peak of each device.
    """
    if quiet:
        return Group(*map(_verdict, document.devices))
    title = heading("memprof analyze: ", f"{document.file}, a {document.format}")
    if document.settings:
        title.append(f" ({document.settings})", style="dim")
    parts: list[RenderableType] = [title]
    many = len(document.devices) > 1
    parts += [_device(device, replay=replay, many=many) for device in document.devices]
    parts += [dim(f"Note: {sentence}") for sentence in document.assumptions]
    return Group(*parts, *([] if file is None else render_next(after_analysis(document, file))))


def _verdict(device: DeviceReport) -> RenderableType:
    held = device.end if device.state_only else device.peak
    ended = f"; ran out of memory {len(device.ooms)} times" if len(device.ooms) > 1 else "; ran out of memory"
    return Text(
        f"device {device.device}: {format_bytes(held.allocated_bytes)} allocated, {format_bytes(held.reserved_bytes)} "
        f"reserved {'at the end' if device.state_only else 'at the peak'}{ended if device.ooms else ''}"
    )


def _device(device: DeviceReport, *, replay: bool, many: bool) -> RenderableType:
    parts: list[RenderableType] = [Text(f"\nDevice {device.device}", style="bold underline")] if many else []
    parts.append(_summary(device))
    if len(device.timeline.events) > 1:
        parts.append(_AnalysisCurves(device))
    for oom in device.ooms:
        title = Text(f"\nOut of memory at event {oom.event:,}", style="bold red")
        parts += [title.append(f" in {source_text(oom.source)}", style="default"), _bullets(oom.reasons)]
    parts.append(_moment(device))
    if device.moment.blocks:
        parts.append(_blocks(device))
    parts.append(_fragmentation(device))
    if not device.state_only:
        parts.append(_leaks(device))
    if (missing := device.missing_frames).reasons:
        said = f": {format_bytes(missing.allocated_bytes)} of the peak say nothing of who made them"
        parts += [heading("\nFrames missing", said if missing.count else ""), _bullets(missing.reasons)]
    if replay:
        parts.append(_replay(device.replay))
    if device.what_if is not None:
        parts.append(_what_if_table(device.what_if))
    return Group(*parts)


def _event_text(device: DeviceReport, event: int) -> str:
    if device.state_only:
        return "now"
    if event < 0:
        return "before the first event"
    return f"event {event:,}"


def _when(device: DeviceReport, amounts: Amounts) -> str:
    where = _event_text(device, amounts.event)
    return f"{where}, in {amounts.stage}" if amounts.stage else where


def _summary(device: DeviceReport) -> RenderableType:
    made = table("", ">requested", ">allocated", ">reserved", "~when", ruled=True)
    rows = [("start", device.start), ("peak", device.peak), ("end", device.end)]
    for name, amounts in rows[2:] if device.state_only else rows:
        style = "bold" if name == "peak" else ""
        cells = (amounts.requested_bytes, amounts.allocated_bytes, amounts.reserved_bytes)
        made.add_row(name, *map(format_bytes, cells), _when(device, amounts), style=style)
    if device.peak_reserved_bytes > device.peak.reserved_bytes and not device.state_only:
        where = _event_text(device, device.peak_reserved_event)
        made.add_row("most reserved", "", "", format_bytes(device.peak_reserved_bytes), where)
    if device.state_only:
        return Group(made, dim("No events were recorded: this is the state when the snapshot was taken."))
    recorded = f"{device.events:,} events, {device.allocations:,} allocations"
    if device.timeline.seconds is not None:
        recorded += f", {device.timeline.seconds:,.2f} s"
    if device.steps is not None:
        recorded += f"; {device.steps.count} steps, seen from {device.steps.found_by}"
    return Group(made, dim(recorded + "."))


@dataclass(frozen=True)
class _AnalysisCurves:
    """The curves of allocated and reserved memory, as wide as the console."""

    device: DeviceReport

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = self.device.timeline
        columns = max(min(options.max_width - _LABEL - _SCALE, len(line.events)), 1)
        highest = max((*line.reserved_bytes, *line.allocated_bytes, 1))
        yield Text("")
        for name, values in (("allocated", line.allocated_bytes), ("reserved", line.reserved_bytes)):
            yield Text(f"{name:<{_LABEL}}{_curve(values, columns, highest)}  {format_bytes(max(values))}")
        yield dim(f"{'':<{_LABEL}}{_marks(self.device, columns)}")
        legend = "^ the peak" + ("; ! out of memory; ‼ both" if self.device.ooms else "")
        yield dim(f"{'':<{_LABEL}}{legend}")


def _marks(device: DeviceReport, columns: int) -> str:
    marks = [" "] * columns
    for event, mark in [*((oom.event, "!") for oom in device.ooms), (device.peak.event, "^")]:
        if event >= 0:
            at = min(event * columns // device.events, columns - 1)
            marks[at] = mark if marks[at] == " " else "‼"
    return "".join(marks).rstrip()


def _curve(values: tuple[int, ...], columns: int, highest: int) -> str:
    begins = [len(values) * column // columns for column in range(columns + 1)]
    return curve((max(values[begin : max(end, begin + 1)]) for begin, end in pairwise(begins)), highest)


def _moment(device: DeviceReport) -> RenderableType:
    moment = device.moment
    amounts = moment.amounts
    name = "When the snapshot was taken" if device.state_only else _MOMENTS[moment.what]
    held = f"{format_bytes(amounts.allocated_bytes)} in {moment.num_blocks:,} blocks, by {moment.by}"
    if moment.pending_bytes:
        held += f"; {format_bytes(moment.pending_bytes)} more freed and waiting for other streams"
    unit = unit_for(amounts.allocated_bytes, smallest=1)
    headers = [f">{unit.name}", ">share", ">blocks", *(["|category"] if moment.by != "category" else [])]
    shows_module = moment.by in ("frame", "size", "category")
    beside = "mostly" if moment.by != "frame" else "in module"
    headers += [f"~{moment.by}", *([f"~{beside}"] * shows_module)]
    made = table(*headers, drop=(beside, "category", "share", "blocks"))
    total = amounts.allocated_bytes + moment.pending_bytes or 1
    for row in moment.groups:
        cells = [unit.amount(row.allocated_bytes), f"{row.allocated_bytes / total:.1%}", f"{row.count:,}"]
        if moment.by != "category":
            cells.append(row.category)
        key = source_text(row.key) if moment.by == "frame" else row.key
        if row.op and moment.by == "frame" and row.op not in key:
            key += f"  {row.op.removeprefix('aten.')}"
        cells.append(key)
        if shows_module:
            cells.append("" if row.module == row.key else _tail(row.module))
        made.add_row(*cells)
    parts: list[RenderableType] = [section(heading(f"\n{name} ({_when(device, amounts)}): ", held), made)]
    if moment.num_groups > len(moment.groups):
        rest = amounts.allocated_bytes + moment.pending_bytes - sum(row.allocated_bytes for row in moment.groups)
        more = moment.num_groups - len(moment.groups)
        parts.append(dim(f"  and {format_bytes(rest)} in {more:,} more groups (--top)"))
    return Group(*parts)


def _blocks(device: DeviceReport) -> RenderableType:
    blocks = device.moment.blocks
    unit = unit_for(blocks[0].allocated_bytes, smallest=1)
    made = table(f">{unit.name}", ">x", "|life in events", "~what it is", drop=("life in events", "x"))
    for block in _kinds(blocks):
        life = block_life(block) if block.alike == 1 else f"{block_life(block).split(' ')[0]}, …"
        made.add_row(unit.amount(block.allocated_bytes), f"{block.alike:,}", life, _block_text(block))
    return section("\nLargest blocks", made)


def _kinds(blocks: tuple[BlockRow, ...]) -> list[BlockRow]:
    """Return one block for each size, line, operator and category."""
    found: dict[tuple[object, ...], BlockRow] = {}
    for block in blocks:
        found.setdefault((block.allocated_bytes, block.source, block.op, block.category), block)
    return list(found.values())


def _block_text(block: BlockRow) -> Text:
    text = Text(block.category)
    text.append(f" {source_text(block.source)}")
    if block.op and block.op not in block.source:
        text.append(f" {block.op.removeprefix('aten.')}", style="dim")
    return text


def _fragmentation(device: DeviceReport) -> RenderableType:
    at_peak, at_end = device.fragmentation_at_peak, device.fragmentation_at_end
    one_moment = at_peak.event == at_end.event or device.state_only
    moments = [("", at_end)] if one_moment else [("at the peak", at_peak), ("at the end", at_end)]
    made = table("", *(f">{name}" for name, _ in moments))
    made.show_header = not one_moment
    for label, field in _FRAGMENTATION.items():
        made.add_row(label, *(format_bytes(getattr(one, field)) for _, one in moments))
    parts: list[RenderableType] = [section("\nFragmentation", made)]
    shown = at_peak if at_peak.nearly_empty else at_end
    if shown.nearly_empty:
        parts.append(_pins(shown, "" if one_moment else " at the peak" if shown is at_peak else " at the end"))
    return Group(*parts)


def _pins(found: FragmentationRow, when: str) -> RenderableType:
    alike = Counter(_pin(segment) for segment in found.nearly_empty)
    shown = alike.most_common()[:MAX_PINS]
    lines = [f"{f'{count} x ' if count > 1 else ''}{line}" for line, count in shown]
    rest = found.nearly_empty_segments - sum(count for _, count in shown)
    lines += [f"and {rest:,} more"] if rest else []
    return Group(Text(f"  Nearly empty segments{when}, and what keeps them:"), _bullets(lines, indent=4))


def _bullets(sentences: Sequence[str], indent: int = 2) -> RenderableType:
    """Return sentences as a list, with their further lines indented."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    for sentence in sentences:
        grid.add_row("-", sentence)
    return Padding(grid, (0, 0, 0, indent))


def _pin(segment: PinnedSegment) -> str:
    shown = _kinds(segment.blocks)[:3]
    pins = (
        f"{format_bytes(block.allocated_bytes)}{f' x{block.alike:,}' * (block.alike > 1)} {source_text(block.source)}"
        for block in shown
    )
    named = sum(block.allocated_bytes * block.alike for block in shown)
    used = f"{format_bytes(segment.size_bytes)} ({segment.pool}), {format_bytes(segment.used_bytes)} in use: "
    return used + "; ".join(pins) + ("; …" if named < segment.used_bytes else "")


def _leaks(device: DeviceReport) -> RenderableType:
    if device.steps is None:
        return Text("\nLeaks: not looked for, as fewer than three steps can be told apart.", style="dim")
    if not device.leaks:
        return Text(f"\nLeaks: none; nothing piles up over the {device.steps.count} steps.")
    lines = (
        f"  {format_bytes(leak.per_step_bytes)} per step, {format_bytes(leak.allocated_bytes)} in "
        f"{leak.count:,} blocks: {source_text(leak.source)} {leak.op.removeprefix('aten.')}".rstrip()
        for leak in device.leaks
    )
    title = Text("\nLeaks: what steps leave behind and nothing frees", style="bold yellow")
    return Group(title, *map(Text, lines))


def _replay(replay: ReplayRow) -> RenderableType:
    layout = "identical" if replay.final_layout_identical else "different"
    identical = f"{replay.identical_addresses:,} of {replay.allocations:,} addresses identical"
    title = heading("\nReplay: ", f"{identical}, final layout {layout}")
    first = replay.first_difference
    if first is None:
        return title
    why = first.reason or "nothing in the file explains it"
    return Group(title, Text(f"  first difference at event {first.event:,}: {first.problem}; {why}"))


def _what_if_table(found: WhatIf) -> RenderableType:
    least_needed = ("segments", "reserved at the end")
    made = table("~settings", ">peak reserved", ">reserved at the end", ">segments", drop=least_needed)
    for one, note in ((found.before, " (as recorded)"), (found.after, "")):
        sizes = format_bytes(one.peak_reserved_bytes), format_bytes(one.final_reserved_bytes)
        made.add_row(one.settings + note, *sizes, f"{one.final_segments:,}")
    verdict = "saves" if found.saved_bytes > 0 else "costs" if found.saved_bytes < 0 else "changes nothing of the peak"
    sentence = f"  It {verdict}" + (f" {format_bytes(abs(found.saved_bytes))} of the peak" if found.saved_bytes else "")
    notes = [Text(sentence + ".")]
    if found.before.peak_reserved_bytes != found.recorded_peak_reserved_bytes:
        recorded = f"  Recorded were {format_bytes(found.recorded_peak_reserved_bytes)}: what was cached before the "
        notes.append(dim(f"{recorded}recording began is not known, so both replays begin with the live blocks alone."))
    if found.failed_allocations:
        notes.append(dim(f"  Requests that were refused ({found.failed_allocations}) are left out of both."))
    return Group(section("\nWhat if: the same requests", made), *notes)


def _tail(module: str) -> str:
    """Return the innermost calls of a module chain, or the end of a module path."""
    if len(module) > _PATH and " > " not in module and not module.startswith("("):
        kept: list[str] = []
        for part in reversed(module.split(".")):
            if kept and len(".".join((part, *kept))) > _PATH:
                break
            kept.insert(0, part)
        return "…" + ".".join(kept)
    parts = module.split(" > ")
    return " > ".join(parts if len(parts) <= 3 else ["…", *parts[-3:]])
