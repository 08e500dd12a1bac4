"""A picture of a run, for a pull request or a README: memory by category over the run, and the peak's categories."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from memprof.errors import UsageError, printable
from memprof.fixes.catalog import check_package
from memprof.ledger.over_time import OverTime
from memprof.report.documents.report import Report
from memprof.report.export.image_kind import IMAGE
from memprof.report.page.figures import COLOURS
from memprof.report.terminal.cells import Unit, choose_unit
from memprof.report.terminal.console import to_text
from memprof.report.terminal.limit import format_limit
from memprof.report.terminal.verdict import render_verdict
from memprof.trace.files import write_atomically
from memprof.units import format_bytes

_INCHES = (11, 5)
_TITLE_COLUMNS = 110
_LIMIT_COLOUR = "#c62828"
_DOTS_PER_INCH = 150  # Of a PNG.
_MAX_TIMES_PEAK = (
    3  # A GPU with more memory than this times the peak is not drawn: the run would be a line at the bottom.
)
_MIN_SHARE = 0.005  # Of the peak: less is 0% there.
_MAX_TICKS = 12
_ROOM_ABOVE = 0.1  # Of what is drawn, for the names of lines.


def write_image(document: Report, path: Path, *, force: bool = False) -> None:
    """Write a picture of a run as PNG or SVG, by the suffix of `path`.

    `force` also replaces a file that memprof has not written. Raises UsageError: the run has no memory to draw, another
    file is at `path`, or matplotlib is not installed. MemprofError: the file cannot be written.
    """
    check_package("--image", "matplotlib")
    from matplotlib import rc_context

    suffix, output = path.suffix[1:].lower(), BytesIO()
    metadata = {"Creator": "memprof", "Date": None} if suffix == "svg" else {"Software": "memprof"}
    with rc_context({"svg.hashsalt": "memprof"}):  # The same run, the same bytes.
        draw_run(document).savefig(output, format=suffix, dpi=_DOTS_PER_INCH, metadata=metadata)
    write_atomically(path, output.getvalue(), IMAGE, force=force)


def draw_run(document: Report) -> Any:
    """Return a run as a matplotlib `Figure`. Raises UsageError: the run has no memory to draw."""
    # Without pyplot, which would open windows and keep every figure.
    from matplotlib.figure import Figure

    over_time, peak_bytes = document.over_time, document.peak.allocated_bytes
    if over_time is None:
        raise UsageError("this report has no memory over time to draw", value="--image", hint="run it again")
    unit = choose_unit(peak_bytes)
    figure = Figure(figsize=_INCHES, layout="constrained")
    verdict = render_verdict(document, is_short=True) if document.limit is None else format_limit(document.limit)
    title = to_text(verdict, width=_TITLE_COLUMNS).strip()
    figure.suptitle(title, x=0.01, ha="left", fontsize="medium", parse_math=False)
    axes = figure.add_subplot()
    names = [name for name in COLOURS if name in over_time.categories]
    areas = axes.stackplot(
        over_time.events,
        [[size / unit.num_bytes for size in over_time.categories[name]] for name in names],
        labels=[_label_category(name, document.peak.categories.get(name, 0), peak_bytes) for name in names],
        colors=[COLOURS[name] for name in names], step="post", linewidth=0,
    )  # fmt: skip
    axes.legend(
        handles=areas[::-1], title=f"at the peak, {format_bytes(peak_bytes)}", alignment="left", frameon=False,
        loc="upper left", bbox_to_anchor=(1.01, 1),
    )  # fmt: skip
    axes.set_ylabel(unit.name)
    axes.margins(x=0, y=_ROOM_ABOVE)
    ticks = over_time.steps[:: max(1, -(-len(over_time.steps) // _MAX_TICKS))]
    axes.set_xticks([event for _, event in ticks], [f"step {step}" for step, _ in ticks], ha="left")
    axes.axvline(over_time.peak_event, color="#444", linestyle=":", linewidth=1)
    _draw_limits(axes, document, over_time, unit)
    return figure


def _draw_limits(axes: Any, document: Report, over_time: OverTime, unit: Unit) -> None:
    """Draw the GPU's memory and the allocation that fails as lines with their names."""
    if over_time.failed_event is not None:
        axes.axvline(over_time.failed_event, color=_LIMIT_COLOUR, linewidth=1)
        side = "right" if 2 * over_time.failed_event > over_time.num_events else "left"
        place = {"ha": side, "va": "top", "transform": axes.get_xaxis_transform()}
        axes.text(over_time.failed_event, 0.99, " out of memory ", color=_LIMIT_COLOUR, **place)
    gpu_bytes = document.device.usable_bytes
    if gpu_bytes is not None and gpu_bytes < _MAX_TIMES_PEAK * document.peak.allocated_bytes:
        height = gpu_bytes / unit.num_bytes
        axes.axhline(height, color=_LIMIT_COLOUR, linestyle="--", linewidth=1)
        name = f" {printable(document.device.name)}, {format_bytes(gpu_bytes)}"
        axes.text(0, height, name, color=_LIMIT_COLOUR, va="bottom", parse_math=False)


def _label_category(name: str, num_bytes: int, total_bytes: int) -> str:
    share = num_bytes / total_bytes
    return f"{name}: {format_bytes(num_bytes)} ({share:.0%})" if share >= _MIN_SHARE else name
