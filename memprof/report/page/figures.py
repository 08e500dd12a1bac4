"""Plotly figures for notebooks: memory over the run, a treemap of the peak, and the ladder."""

from __future__ import annotations

from collections import Counter
from typing import Any

from memprof.errors import UsageError, printable, unknown_name
from memprof.fixes.catalog import check_package
from memprof.ledger.ledger import Ledger
from memprof.report.documents.ladder import LadderRow
from memprof.report.page.library import make_figure
from memprof.report.page.moments import Moments, build_moments
from memprof.report.terminal.cells import choose_unit
from memprof.trace.events import NONE
from memprof.trace.facts import DeviceFacts
from memprof.units import format_bytes

# Colours of categories and of other memory, from the bottom of a stack up.
COLOURS = {
    "parameters": "#4e79a7", "unsharded parameters": "#85b6dd", "gradients": "#f28e2b", "optimizer state": "#59a14f",
    "activations": "#e15759", "logits and loss": "#b07aa1", "inputs": "#9c755f", "buffers": "#8cd17d",
    "KV cache": "#499894", "temporaries": "#edc948", "communication": "#d37295", "library workspace": "#a0cbe8",
    "fragmentation": "#bab0ac", "unattributed": "#79706e", "free in segments": "#c9ced4", "CUDA context": "#8a939c",
}  # fmt: skip
FITS, OVER = "#59a14f", "#e15759"  # Bars of runs that fit the GPU, and of runs that do not.
_MAX_BINS = 1200
_MIN_SHARE = 1 / 3000  # Of the peak: smaller parts are less than a pixel of a treemap.
Figure = Any  # plotly's `Figure`, which has no type annotations.


def draw_figure(kind: str, ledger: Ledger | None, device: DeviceFacts, rows: tuple[LadderRow, ...]) -> Figure:
    """Return the figure `kind` of a run: `timeline` or `treemap` (from the ledger) or `ladder` (from `rows`).
    Raises UsageError: no such figure, no data for the figure, or plotly is not installed."""
    kinds = ("timeline", "treemap", "ladder")
    if kind not in kinds:
        raise unknown_name("figure", kind, kinds)
    check_package("plot()", "plotly")
    if kind == "ladder":
        return _draw_ladder(rows, device.total_bytes)
    if ledger is None:
        hint = "load a capture, which save() of the GPU keeps"
        raise UsageError("a report in JSON has no moments to show", value="plot()", hint=hint)
    return _draw_treemap(ledger) if kind == "treemap" else _draw_timeline(ledger, device.usable_bytes)


def escape_html(text: str) -> str:
    """Return text with escaped HTML and control characters, for plotly's labels."""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _draw_timeline(ledger: Ledger, usable: int | None) -> Figure:
    moments = build_moments(ledger)
    events = _select_events(ledger)
    sums = _sum_by_category(moments, events)
    unit = choose_unit(ledger.peak_bytes)
    scale = float(unit.num_bytes)
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "lines", "name": name, "stackgroup": "all", "x": events,
            "y": [num_bytes / scale for num_bytes in sums[name]], "fillcolor": colour,
            "line": {"shape": "hv", "width": 0, "color": colour},
            "hovertemplate": f"%{{y:,.2f}} {unit.name}<extra>{name}</extra>",
        }
        for name, colour in COLOURS.items()
        if any(sums.get(name, ()))
    ]  # fmt: skip
    traces.append({
        "type": "scatter", "mode": "lines", "name": "allocated", "x": events,
        "y": [ledger.allocated[event] / scale for event in events],
        "line": {"shape": "hv", "width": 1, "color": "#444"},
        "hovertemplate": f"%{{y:,.2f}} {unit.name}<extra>allocated</extra>",
    })  # fmt: skip
    shapes = [_make_line("x", ledger.peak_event, "#444")]
    notes = [_make_annotation(ledger.peak_event, f"peak {format_bytes(ledger.peak_bytes)}")]
    if (oom := ledger.out_of_memory) is not None:
        shapes.append(_make_line("x", oom.event, "#c62828"))
        notes.append({**_make_annotation(oom.event, f"refused: {format_bytes(oom.tried_bytes)}"), "y": 0.85})
    if usable is not None and usable < 3 * ledger.peak_bytes:
        shapes.append({**_make_line("y", usable / scale, "#c62828"), "line": {"color": "#c62828", "dash": "dash"}})
    return make_figure(
        traces,
        {
            "title": {"text": escape_html(f"Memory over the run: {format_bytes(ledger.peak_bytes)} at the peak")},
            "xaxis": {"title": {"text": "event"}, "tickformat": ",d"},
            "yaxis": {"title": {"text": unit.name}, "rangemode": "tozero"},
            "shapes": shapes, "annotations": notes, "hovermode": "x unified",
        },
    )  # fmt: skip


def _select_events(ledger: Ledger) -> list[int]:
    """Return the events to draw: all, or the highest, lowest and last of each of 1,200 bins, and the peak."""
    count, allocated = len(ledger.allocated), ledger.allocated
    if count <= 3 * _MAX_BINS:
        return list(range(count))
    chosen = {0, count - 1}
    for number in range(_MAX_BINS):
        within = range(count * number // _MAX_BINS, count * (number + 1) // _MAX_BINS)
        chosen |= {max(within, key=allocated.__getitem__), min(within, key=allocated.__getitem__), within[-1]}
    return sorted(chosen | {ledger.peak_event})


def _sum_by_category(moments: Moments, events: list[int]) -> dict[str, list[int]]:
    """Return the live bytes by category after each of `events`, which are ascending."""
    changes: dict[int, list[tuple[str, int]]] = {}
    for begin, end, kind, extra in zip(moments.begin, moments.end, moments.kind, moments.extra, strict=True):
        category, num_bytes = moments.words[moments.kinds.category[kind]], moments.kinds.rounded[kind]
        parts = [(category, num_bytes)] + ([("fragmentation", extra)] if extra else [])
        changes.setdefault(begin, []).extend(parts)
        changes.setdefault(end, []).extend((name, -one) for name, one in parts)
    now = Counter[str]()
    columns: dict[str, list[int]] = {name: [] for name in COLOURS}
    event = 0
    for until in events:
        for time in range(event, until + 1):
            for name, num_bytes in changes.get(time, ()):
                now[name] += num_bytes
        event = until + 1
        for name, column in columns.items():
            column.append(now[name])
    return columns


def _make_line(axis: str, at: float, colour: str) -> dict[str, Any]:
    other = "y" if axis == "x" else "x"
    place = {f"{axis}0": at, f"{axis}1": at, f"{other}0": 0, f"{other}1": 1}
    return {
        "type": "line", f"{axis}ref": axis, f"{other}ref": "paper", **place,
        "line": {"color": colour, "dash": "dot", "width": 1.5},
    }  # fmt: skip


def _make_annotation(event: int, text: str) -> dict[str, Any]:
    return {"x": event, "y": 1.0, "yref": "paper", "text": text, "showarrow": False, "xanchor": "left", "xshift": 4}


def _draw_treemap(ledger: Ledger) -> Figure:
    moments = build_moments(ledger)
    kinds, words = moments.kinds, moments.words
    bytes_of, colours = Counter[tuple[str, ...]](), dict[tuple[str, ...], Counter[str]]()
    for begin, end, kind, extra in zip(moments.begin, moments.end, moments.kind, moments.extra, strict=True):
        if not begin <= ledger.peak_event < end:
            continue
        module, category = kinds.module[kind], words[kinds.category[kind]]
        where = ["outside modules"] if module == NONE else words[module].split(".") if words[module] else ["own code"]
        for path, num_bytes in (((*where, category), kinds.rounded[kind]), (("fragmentation",), extra)):
            for depth in range(1, len(path) + 1 if num_bytes else 1):
                bytes_of[path[:depth]] += num_bytes
                colours.setdefault(path[:depth], Counter())[path[-1]] += num_bytes
    shown = [path for path, num_bytes in bytes_of.items() if num_bytes > ledger.peak_bytes * _MIN_SHARE]
    tree = {
        "type": "treemap", "branchvalues": "total", "maxdepth": 3, "textinfo": "label+text", "hoverinfo": "label+text",
        "ids": ["\0".join(path) for path in shown], "labels": [escape_html(path[-1]) for path in shown],
        "parents": ["\0".join(path[:-1]) for path in shown], "values": [bytes_of[path] for path in shown],
        "text": [f"{format_bytes(bytes_of[path])}, {bytes_of[path] / ledger.peak_bytes:.1%}" for path in shown],
        "marker": {"colors": [COLOURS[colours[path].most_common(1)[0][0]] for path in shown]},
    }  # fmt: skip
    return make_figure([tree], {"title": {"text": f"Who holds the peak of {format_bytes(ledger.peak_bytes)}"}})


def _draw_ladder(rows: tuple[LadderRow, ...], total: int | None) -> Figure:
    if not rows:
        raise UsageError("the report has no ladder", value="ladder", hint="ask for one: memprof profile ... --ladder")
    unit = choose_unit(max(row.device_used_bytes for row in rows))
    bars = {
        "type": "bar", "orientation": "h",
        "y": [f"{place}. {f'+ {row.added}' if row.added else 'baseline'}" for place, row in enumerate(rows)],
        "x": [row.device_used_bytes / unit.num_bytes for row in rows],
        "text": [format_bytes(row.device_used_bytes) for row in rows], "textposition": "auto",
        "marker": {"color": [FITS if row.fits else OVER for row in rows]},
        "hovertext": [escape_html(row.cost.note) for row in rows], "hoverinfo": "text",
    }  # fmt: skip
    return make_figure(
        [bars],
        {
            "title": {"text": "What the GPU must have, with one fix more in each row"},
            "yaxis": {"autorange": "reversed", "automargin": True}, "xaxis": {"title": {"text": unit.name}},
            "shapes": [] if total is None else [_make_line("x", total / unit.num_bytes, "#c62828")],
        },
    )  # fmt: skip
