"""The first screen of `memprof analyze`: the answer, why memory ran out, what is live, and what is reserved unused.

It has up to about 40 lines of 100 columns; `--full` prints the whole analysis.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.report.documents.analysis import Analysis, DeviceReport
from memprof.report.terminal.analysis import (
    MemoryCurves,
    render_answer,
    render_bullets,
    render_live_memory,
    render_replay,
    render_title,
    render_what_if,
)
from memprof.report.terminal.console import dim, make_heading
from memprof.report.terminal.next_step import choose_step_after_analyze, render_next_step
from memprof.units import format_bytes


def render(
    document: Analysis, *, replay: bool = False, quiet: bool = False, file: Path | None = None
) -> RenderableType:
    """Return the first screen of an analysis; `analysis.render` explains the arguments."""
    answers = [answer for device in document.devices for answer in render_answer(device)]
    if quiet:
        return Group(*answers)
    parts: list[RenderableType] = [*answers]
    for device in document.devices:
        for oom in device.ooms[:1]:
            where = f" on device {device.device}" * (len(document.devices) > 1)
            parts += [make_heading(f"\nWhy it ran out of memory{where}"), render_bullets(oom.reasons), Text("")]
    parts.append(render_title(document))
    for device in document.devices:
        if len(document.devices) > 1:
            parts.append(Text(f"\nDevice {device.device}", style="bold underline"))
        parts += _render_device(device, replay=replay)
    next_step = [] if file is None else render_next_step(choose_step_after_analyze(document, file))
    return Group(*parts, *next_step, dim("More: --full (blocks, segments, all leaks), --by module, --html FILE"))


def _render_device(device: DeviceReport, *, replay: bool) -> list[RenderableType]:
    parts: list[RenderableType] = [MemoryCurves(device)] if len(device.timeline.events) > 1 else []
    parts.append(render_live_memory(device))
    parts.append(_render_unused(device))
    missing = device.missing_frames
    if missing.count:
        parts.append(Text(f"\nFrames missing at the peak: {missing.reasons[0]}"))
    if replay:
        parts.append(render_replay(device.replay))
    if device.what_if is not None:
        parts.append(render_what_if(device.what_if))
    return parts


def _render_unused(device: DeviceReport) -> Text:
    """Return a sentence on what is reserved and not in use, at the peak, or of a state alone then."""
    row, held = device.fragmentation_at_peak, device.peak
    if device.state_only:
        row, held = device.fragmentation_at_end, device.end
    title, reserved = "\nFragmentation: ", format_bytes(held.reserved_bytes)
    if not row.free_bytes:
        return make_heading(title, f"none; all of the {reserved} reserved are in use.")
    unused = f"{format_bytes(row.free_bytes)} of {reserved} reserved are not in use"
    pinned = f"{format_bytes(row.pinned_bytes)} of them beside live blocks of the same segments"
    return make_heading(title, f"{unused} ({row.free_bytes / held.reserved_bytes:.0%}), {pinned}.")
