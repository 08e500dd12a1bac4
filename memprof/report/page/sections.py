"""Sections of the HTML pages of comparisons, recordings and recommendations, with their figures and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from memprof.ledger.over_time import OverTime
from memprof.report.documents.analysis import Analysis, DeviceReport
from memprof.report.documents.comparison import Comparison, TensorGroup
from memprof.report.documents.limit import PAGING
from memprof.report.documents.recommendation import Configuration, LargestModel, Recommendation
from memprof.report.page.figures import COLOURS, FITS_COLOUR, OVER_COLOUR, escape_html
from memprof.report.terminal.cells import (
    Unit,
    choose_unit,
    describe_total,
    format_block_life,
    format_seconds,
    format_signed_bytes,
    format_source,
    format_tensors,
)
from memprof.units import format_bytes

# A string, a number, or a string with the number by which rows are sorted.
PageCell = str | int | tuple[str, int | float | None]
_MAX_BARS = 24
_BAR_PIXELS = 30  # Pixels of a bar.


@dataclass(frozen=True, slots=True)
class Section:
    """One section of an HTML page: a plotly figure (traces and layout), a table, a text, or several of these."""

    title: str
    note: str = ""
    traces: list[dict[str, Any]] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] = ()  # Headers: `>` figures, `$` a command.
    rows: tuple[tuple[PageCell, ...], ...] = ()
    text: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the section as JSON values in the form that the page's script reads."""
        headers = ((name.lstrip(">$"), name[:1]) for name in self.columns)
        columns = [{"name": name, "number": mark == ">", "code": mark == "$"} for name, mark in headers]
        return {
            "title": self.title,
            "note": self.note,
            "figure": {"data": self.traces, "layout": self.layout} if self.traces else None,
            "table": {"columns": columns, "rows": self.rows} if self.rows else None,
            "text": self.text,
        }


def build_sections(document: Comparison | Analysis | Recommendation) -> list[Section]:
    """Return the sections of a document's HTML page that have content, in reading order."""
    if isinstance(document, Comparison):
        sections = _build_comparison_sections(document)
    elif isinstance(document, Analysis):
        sections = _build_analysis_sections(document)
    else:
        sections = _build_recommendation_sections(document)
    return [section for section in sections if section.traces or section.rows or section.text]


def _make_cell(num_bytes: int | None, *, sign: bool = False) -> PageCell:
    if num_bytes is None:
        return "-", None
    return format_signed_bytes(num_bytes) if sign or num_bytes < 0 else format_bytes(num_bytes), num_bytes


def _draw_bars(
    names: Sequence[str], sides: dict[str, tuple[Sequence[int], str | list[str]]], unit: Unit
) -> dict[str, Any]:
    """Return traces and layout of a bar chart: a row per name, and per entry of `sides` (label -> sizes in bytes and
    colours) a bar in each row."""
    traces = [
        {
            "type": "bar", "orientation": "h", "name": side, "y": [escape_html(name) for name in names],
            "x": [size / unit.num_bytes for size in sizes], "marker": {"color": colour},
            "text": [format_bytes(size) for size in sizes], "textposition": "auto", "hoverinfo": "y+text+name",
        }
        for side, (sizes, colour) in sides.items()
    ]  # fmt: skip
    layout = {
        "height": 90 + _BAR_PIXELS * len(names) * len(sides), "barmode": "group", "showlegend": len(sides) > 1,
        "yaxis": {"autorange": "reversed", "fixedrange": True}, "xaxis": {"title": {"text": unit.name}},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    }  # fmt: skip
    return {"traces": traces, "layout": layout}


_COLOUR_A, _COLOUR_B = "#4e79a7", "#f28e2b"


def _build_comparison_sections(document: Comparison) -> Iterator[Section]:
    sides = (("A", document.a.over_time), ("B", document.b.over_time))
    runs = [(letter, over_time) for letter, over_time in sides if over_time is not None]
    if runs:
        yield Section(
            "Memory over both runs",
            "Allocated by category, event by event, at a hundred moments of each; both have the same scale.",
            **_draw_over_time(runs),
        )
    yield Section(
        "Totals", f"Tolerance: {document.tolerance}.", columns=("figure", ">A", ">B", ">difference", "verdict"),
        rows=tuple(
            (
                row.name, _make_cell(row.a_bytes), _make_cell(row.b_bytes), _make_cell(row.difference_bytes, sign=True),
                describe_total(row),
            )
            for row in document.totals
            if row.a_bytes is not None or row.b_bytes is not None
        ),
    )  # fmt: skip
    if document.categories:
        max_bytes = max(max(row.a_bytes, row.b_bytes) for row in document.categories)
        names = [row.category for row in document.categories]
        a, b = [row.a_bytes for row in document.categories], [row.b_bytes for row in document.categories]
        yield Section(
            "Categories", "At each one's own peak, without kernels' own memory.",
            **_draw_bars(names, {"A": (a, _COLOUR_A), "B": (b, _COLOUR_B)}, choose_unit(max_bytes)),
        )  # fmt: skip
    yield Section(
        "Tensors at the peak that differ", f"Matched by {document.tensors_matched_by}.",
        columns=(">difference", "category", "where", "A", "B"),
        rows=tuple(
            (_make_cell(row.difference_bytes, sign=True), row.category, row.where or "", *map(_to_text, (row.a, row.b)))
            for row in document.tensors
        ),
    )  # fmt: skip
    yield Section(
        "Stages that differ", "The most that is allocated in each.",
        columns=("stage", ">step", ">A", ">B", ">difference"),
        rows=tuple(
            (
                row.name, row.step,
                *(_make_cell(None if side is None else side.peak_allocated_bytes) for side in (row.a, row.b)),
                _make_cell(row.difference_bytes, sign=True) if row.difference_bytes is not None else (row.status, None),
            )
            for row in document.stages
            if row.difference_bytes != 0
        ),
    )  # fmt: skip
    yield Section(
        "Settings that differ",
        columns=("setting", "A", "B"),
        rows=tuple((row.name, _format_setting(row.a), _format_setting(row.b)) for row in document.settings),
    )
    yield Section(
        "Findings that differ", columns=("finding", ">A", ">B"),
        rows=tuple(
            (row.id, _make_status_cell(row.in_a, row.a_bytes), _make_status_cell(row.in_b, row.b_bytes))
            for row in document.findings or ()
        ),
    )  # fmt: skip


def _draw_over_time(runs: list[tuple[str, OverTime]]) -> dict[str, Any]:
    max_bytes = max(max(over_time.allocated_bytes) for _, over_time in runs)
    unit = choose_unit(max_bytes)
    traces: list[dict[str, Any]] = []
    layout: dict[str, Any] = {
        "height": 60 + 250 * len(runs), "showlegend": True, "hovermode": "x unified", "annotations": [],
        "grid": {"rows": len(runs), "columns": 1, "pattern": "independent", "ygap": 0.28},
        "legend": {"orientation": "h", "y": -0.08, "yanchor": "top"},
    }  # fmt: skip
    legend_names: set[str] = set()
    for i, (letter, over_time) in enumerate(runs, 1):
        axis = "" if i == 1 else str(i)
        traces += _draw_areas(over_time, axis, unit, legend_names)
        layout[f"xaxis{axis}"] = {"tickformat": ",d", "showgrid": False}
        layout[f"yaxis{axis}"] = {"range": [0, 1.08 * max_bytes / unit.num_bytes], "title": {"text": unit.name}}
        layout["annotations"].append({
            "text": f"{letter}: peak {format_bytes(max(over_time.allocated_bytes))}", "showarrow": False, "x": 0,
            "xanchor": "left", "xref": f"x{axis} domain", "y": 1.02, "yanchor": "bottom", "yref": f"y{axis} domain",
        })  # fmt: skip
    return {"traces": traces, "layout": layout}


def _draw_areas(over_time: OverTime, axis: str, unit: Unit, legend_names: set[str]) -> Iterator[dict[str, Any]]:
    """Yield a stacked area per category, from the bottom up; add new categories to `legend_names`."""
    for name, colour in COLOURS.items():
        if name not in over_time.categories:
            continue
        yield {
            "type": "scatter", "mode": "lines", "name": name, "stackgroup": f"run{axis}", "legendgroup": name,
            "showlegend": name not in legend_names, "x": over_time.events, "xaxis": f"x{axis}", "yaxis": f"y{axis}",
            "y": [size / unit.num_bytes for size in over_time.categories[name]], "fillcolor": colour,
            "line": {"shape": "hv", "width": 0, "color": colour},
            "hovertemplate": f"%{{y:,.2f}} {unit.name}",
        }  # fmt: skip
        legend_names.add(name)


def _to_text(side: TensorGroup | None) -> str:
    return "-" if side is None else f"{format_tensors(side)} {side.op.removeprefix('aten.')}"


def _format_setting(value: Any) -> str:
    return "-" if value is None or value == "" else str(value)


def _make_status_cell(is_found: bool, num_bytes: int | None) -> PageCell:
    return ("-", None) if not is_found else ("found", None) if num_bytes is None else _make_cell(num_bytes)


def _build_analysis_sections(document: Analysis) -> Iterator[Section]:
    for device in document.devices:
        yield from _build_device_sections(device, f" of device {device.device}" if len(document.devices) > 1 else "")


def _build_device_sections(device: DeviceReport, suffix: str) -> Iterator[Section]:
    timeline = device.timeline
    if len(timeline.events) > 1:
        note = "Allocated by tensors, and reserved for them."
        yield Section(f"Memory over the recording{suffix}", note, **_draw_curves(device))
    reasons = [f"Event {oom.event:,}: {reason}" for oom in device.ooms for reason in oom.reasons]
    yield Section(f"Out of memory{suffix}", text="\n".join(reasons))
    moment, total = device.moment, device.moment.amounts.allocated_bytes + device.moment.pending_bytes or 1
    groups = moment.groups[:_MAX_BARS]
    kind = "end" if device.state_only else moment.what
    when = "after the event" if kind == "event" else f"at the {kind}"
    names = [f"{i}. {format_source(row.key) or 'not known'}" for i, row in enumerate(groups, 1)]
    unit = choose_unit(max((row.allocated_bytes for row in groups), default=0), min_unit_bytes=1)
    colours = [COLOURS.get(row.category, OVER_COLOUR) for row in groups]
    yield Section(
        f"What is live {when}{suffix}",
        f"{format_bytes(moment.amounts.allocated_bytes)} in {moment.num_blocks:,} blocks, by {moment.by}; the largest "
        "groups, in the colours of their categories.",
        **(_draw_bars(names, {"bytes": ([row.allocated_bytes for row in groups], colours)}, unit) if groups else {}),
        columns=(">bytes", ">share", ">blocks", "category", moment.by, "operator", "module"),
        rows=tuple(
            (
                _make_cell(row.allocated_bytes), (f"{row.allocated_bytes / total:.1%}", row.allocated_bytes), row.count,
                row.category, format_source(row.key), row.op.removeprefix("aten."), row.module,
            )
            for row in moment.groups
        ),
    )  # fmt: skip
    yield Section(
        f"Largest blocks{suffix}",
        columns=(">bytes", ">alike", "life in events", "category", "line", "operator", "module"),
        rows=tuple(
            (
                _make_cell(block.allocated_bytes), block.alike, format_block_life(block), block.category,
                format_source(block.source), block.op.removeprefix("aten."), block.module,
            )
            for block in moment.blocks
        ),
    )  # fmt: skip
    yield Section(
        f"Leaks{suffix}", "What steps leave behind and nothing frees.",
        columns=(">a step", ">in all", ">blocks", "line", "operator"),
        rows=tuple(
            (
                _make_cell(leak.per_step_bytes), _make_cell(leak.allocated_bytes), leak.count,
                format_source(leak.source), leak.op,
            )
            for leak in device.leaks
        ),
    )  # fmt: skip
    peak_and_end = (("peak", device.fragmentation_at_peak), ("end", device.fragmentation_at_end))
    fields = {
        "reserved, not in use": "free_bytes", "in wholly free segments": "releasable_bytes",
        "pinned by live blocks": "pinned_bytes", "largest free block": "largest_free_bytes",
        "rounding": "rounding_bytes",
    }  # fmt: skip
    yield Section(
        f"Fragmentation{suffix}", columns=("what", *(f">at the {name}" for name, _ in peak_and_end)),
        rows=tuple((name, *(_make_cell(getattr(row, key)) for _, row in peak_and_end)) for name, key in fields.items()),
    )  # fmt: skip


def _draw_curves(device: DeviceReport) -> dict[str, Any]:
    timeline = device.timeline
    unit = choose_unit(max((*timeline.reserved_bytes, *timeline.allocated_bytes)), min_unit_bytes=1)
    traces = [
        {
            "type": "scatter", "mode": "lines", "name": name, "x": timeline.events, "fill": fill,
            "line": {"shape": "hv", "color": colour},
            "y": [size / unit.num_bytes for size in sizes], "hovertemplate": f"%{{y:,.2f}} {unit.name}",
        }
        for name, sizes, fill, colour in (
            ("reserved", timeline.reserved_bytes, "none", "#bab0ac"),
            ("allocated", timeline.allocated_bytes, "tozeroy", _COLOUR_A),
        )
    ]  # fmt: skip
    ooms = [("out of memory", oom.event) for oom in device.ooms]
    moments = [(name, event) for name, event in [("peak", device.peak.event), *ooms] if event >= 0]
    layout = {
        "height": 380, "showlegend": True, "hovermode": "x unified",
        "xaxis": {"title": {"text": "event"}, "tickformat": ",d", "showgrid": False},
        "yaxis": {"title": {"text": unit.name}, "rangemode": "tozero"},
        "shapes": [_make_vertical_line(event, "dot") for _, event in moments],
        "annotations": [_make_label(event, name) for name, event in moments],
    }  # fmt: skip
    return {"traces": traces, "layout": layout}


def _build_recommendation_sections(result: Recommendation) -> Iterator[Section]:
    total_bytes = result.device.total_bytes
    chosen = result.chosen
    if chosen is not None:
        note = f"{chosen.name}, micro-batch {chosen.micro_batch}. Why: {result.reason}."
        yield Section("What to use", note, text=chosen.command)
    if result.choices:
        choices = sorted(result.choices, key=lambda c: (c is not chosen, not c.fits, c.step_seconds or 0.0))
        bars = choices[:_MAX_BARS]
        unit = choose_unit(max(c.needed_bytes for c in bars))
        names = [f"{i}. {c.name}, {c.micro_batch} at a time" for i, c in enumerate(bars, 1)]
        names[0] = names[0].replace(". ", ". chosen: ", 1) if bars[0] is chosen else names[0]
        colours = [FITS_COLOUR if c.fits else OVER_COLOUR for c in bars]
        figure = _draw_bars(names, {"needs": ([c.needed_bytes for c in bars], colours)}, unit)
        figure["traces"][0]["text"] = [f"{format_bytes(c.needed_bytes)}, {_format_time(c.step_seconds)}" for c in bars]
        _mark_capacity(figure["layout"], total_bytes, unit)
        transfers = "of it between GPUs" if result.gpus > 1 else "of it transfers"
        yield Section(
            "What was run",
            "What the GPU must have, and the least time of a step; red does not fit, the line is the GPU. "
            "The chosen one first, then those that fit, the quickest first.",
            **figure,
            columns=(
                "configuration", ">at a time", ">needs", ">left over", ">step", f">{transfers}", "numbers", "verdict",
                "$the run",
            ),
            rows=tuple(_build_choice_row(c, over_gpus=result.gpus > 1) for c in choices),
        )  # fmt: skip
    fitting = [row for row in result.largest if row.model is not None]
    if fitting:
        unit = choose_unit(max(row.needed_bytes for row in fitting))
        names = [f"{row.task}: {row.model}" for row in fitting]
        figure = _draw_bars(names, {"needs": ([row.needed_bytes for row in fitting], FITS_COLOUR)}, unit)
        _mark_capacity(figure["layout"], total_bytes, unit)
        yield Section(
            "The largest models that fit", "What each needs of the GPU; the line is what it has.", **figure,
            columns=("use", "model", ">parameters", ">needs", ">longest context", "next larger", "$the run"),
            rows=tuple(map(_build_largest_row, result.largest)),
        )  # fmt: skip
    yield Section(
        "What would do instead", columns=("what", "which", ">needs", "how it is known"),
        rows=tuple(
            (c.what, c.name, _make_cell(c.needed_bytes), "an estimate" if c.estimate else "it was run")
            for c in result.alternatives
        ),
    )  # fmt: skip
    for name, script in result.snippets.items():
        launch = f"# start with: {result.launch[name]}\n" if name in result.launch else ""
        yield Section(f"Script: {name}", text=f"{launch}{script}")


def _build_largest_row(row: LargestModel) -> tuple[PageCell, ...]:
    if row.model is None:
        return row.task, "none", ("-", None), ("-", None), ("-", None), row.next_model or "-", ""
    parameters, tokens = (f"{row.num_parameters:,}", row.num_parameters), row.context_length or 0
    size, next_model = _make_cell(row.needed_bytes), row.next_model or "-"
    return row.task, row.model, parameters, size, (f"{tokens:,}", tokens), next_model, row.command


def _build_choice_row(choice: Configuration, *, over_gpus: bool) -> tuple[PageCell, ...]:
    fits = "fits" if choice.headroom_bytes >= 0 else "fits, with retries"
    verdict = fits if choice.fits else "pages" if choice.oom_stage == PAGING else f"OOM in {choice.oom_stage}"
    transfer_seconds = choice.link_seconds if over_gpus else choice.bus_seconds
    return (
        choice.name, choice.micro_batch, _make_cell(choice.needed_bytes), _make_cell(choice.headroom_bytes),
        (_format_time(choice.step_seconds), choice.step_seconds),
        (_format_time(transfer_seconds), transfer_seconds), choice.given_up or "the same", verdict, choice.command,
    )  # fmt: skip


def _format_time(seconds: float | None) -> str:
    return "time not known" if seconds is None else format_seconds(seconds)


def _mark_capacity(layout: dict[str, Any], total_bytes: int | None, unit: Unit) -> None:
    if total_bytes is not None:
        position = total_bytes / unit.num_bytes
        layout["shapes"] = [_make_vertical_line(position, "dash")]
        layout["annotations"] = [_make_label(position, f"the GPU: {format_bytes(total_bytes)}")]


def _make_vertical_line(position: float, dash: str) -> dict[str, Any]:
    return {
        "type": "line", "xref": "x", "yref": "paper", "x0": position, "x1": position, "y0": 0, "y1": 1,
        "line": {"dash": dash, "width": 1.5},
    }  # fmt: skip


def _make_label(position: float, text: str) -> dict[str, Any]:
    return {"x": position, "y": 1, "yref": "paper", "yanchor": "bottom", "text": text, "showarrow": False}
