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
    "activations": "#e15759", "logits and loss": "#b07aa1", "inputs": "#9c755f", "kept by the program": "#d7b5a6",
    "buffers": "#8cd17d", "KV cache": "#499894", "temporaries": "#edc948", "communication": "#d37295",
    "library workspace": "#a0cbe8", "fragmentation": "#bab0ac", "unattributed": "#79706e",
    "free in segments": "#c9ced4", "CUDA context": "#8a939c",
}  # fmt: skip
FITS_COLOUR, OVER_COLOUR = "#59a14f", "#e15759"  # Bars of runs that fit the GPU, and of runs that do not.
_MAX_BINS = 1200
_MIN_SHARE = 1 / 3000  # Of the peak: smaller parts are less than a pixel of a treemap.
Figure = Any  # plotly's `Figure`, which has no type annotations.


def draw_figure(kind: str, ledger: Ledger | None, device: DeviceFacts, rows: tuple[LadderRow, ...]) -> Figure:
    """Return a plotly figure of a run; `kind` is `timeline` or `treemap` (of the ledger), or `ladder` (of `rows`).
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


def _draw_timeline(ledger: Ledger, capacity: int | None) -> Figure:
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
    annotations = [_make_annotation(ledger.peak_event, f"peak {format_bytes(ledger.peak_bytes)}")]
    if (oom := ledger.out_of_memory) is not None:
        shapes.append(_make_line("x", oom.event, "#c62828"))
        annotations.append({**_make_annotation(oom.event, f"refused: {format_bytes(oom.tried_bytes)}"), "y": 0.85})
    if capacity is not None and capacity < 3 * ledger.peak_bytes:
        shapes.append({**_make_line("y", capacity / scale, "#c62828"), "line": {"color": "#c62828", "dash": "dash"}})
    return make_figure(
        traces,
        {
            "title": {"text": escape_html(f"Memory over the run: {format_bytes(ledger.peak_bytes)} at the peak")},
            "xaxis": {"title": {"text": "event"}, "tickformat": ",d"},
            "yaxis": {"title": {"text": unit.name}, "rangemode": "tozero"},
            "shapes": shapes, "annotations": annotations, "hovermode": "x unified",
        },
    )  # fmt: skip


def _select_events(ledger: Ledger) -> list[int]:
    """Return the events to draw: all, or in a long run the peak and three events of each of `_MAX_BINS` bins."""
    num_events, allocated = len(ledger.allocated), ledger.allocated
    if num_events <= 3 * _MAX_BINS:
        return list(range(num_events))
    events = {0, num_events - 1}
    for i in range(_MAX_BINS):
        window = range(num_events * i // _MAX_BINS, num_events * (i + 1) // _MAX_BINS)
        events |= {max(window, key=allocated.__getitem__), min(window, key=allocated.__getitem__), window[-1]}
    return sorted(events | {ledger.peak_event})


def _sum_by_category(moments: Moments, events: list[int]) -> dict[str, list[int]]:
    """Return the live bytes by category after each of `events`, which are ascending."""
    changes: dict[int, list[tuple[str, int]]] = {}
    for begin, end, kind, extra in zip(moments.begin, moments.end, moments.kind, moments.extra, strict=True):
        category, num_bytes = moments.words[moments.kinds.category[kind]], moments.kinds.rounded[kind]
        amounts = [(category, num_bytes)] + ([("fragmentation", extra)] if extra else [])
        changes.setdefault(begin, []).extend(amounts)
        changes.setdefault(end, []).extend((name, -size) for name, size in amounts)
    current = Counter[str]()
    curves: dict[str, list[int]] = {name: [] for name in COLOURS}
    event = 0
    for last_event in events:
        for time in range(event, last_event + 1):
            for name, num_bytes in changes.get(time, ()):
                current[name] += num_bytes
        event = last_event + 1
        for name, curve in curves.items():
            curve.append(current[name])
    return curves


def _make_line(axis: str, position: float, colour: str) -> dict[str, Any]:
    cross_axis = "y" if axis == "x" else "x"
    coordinates = {f"{axis}0": position, f"{axis}1": position, f"{cross_axis}0": 0, f"{cross_axis}1": 1}
    return {
        "type": "line", f"{axis}ref": axis, f"{cross_axis}ref": "paper", **coordinates,
        "line": {"color": colour, "dash": "dot", "width": 1.5},
    }  # fmt: skip


def _make_annotation(event: int, text: str) -> dict[str, Any]:
    return {"x": event, "y": 1.0, "yref": "paper", "text": text, "showarrow": False, "xanchor": "left", "xshift": 4}


def _draw_treemap(ledger: Ledger) -> Figure:
    moments = build_moments(ledger)
    kinds, words = moments.kinds, moments.words
    sizes, colours = Counter[tuple[str, ...]](), dict[tuple[str, ...], Counter[str]]()
    for begin, end, kind, extra in zip(moments.begin, moments.end, moments.kind, moments.extra, strict=True):
        if not begin <= ledger.peak_event < end:
            continue
        module, category = kinds.module[kind], words[kinds.category[kind]]
        parts = ["outside modules"] if module == NONE else words[module].split(".") if words[module] else ["own code"]
        for path, num_bytes in (((*parts, category), kinds.rounded[kind]), (("fragmentation",), extra)):
            for depth in range(1, len(path) + 1 if num_bytes else 1):
                sizes[path[:depth]] += num_bytes
                colours.setdefault(path[:depth], Counter())[path[-1]] += num_bytes
    paths = [path for path, num_bytes in sizes.items() if num_bytes > ledger.peak_bytes * _MIN_SHARE]
    tree = {
        "type": "treemap", "branchvalues": "total", "maxdepth": 3, "textinfo": "label+text", "hoverinfo": "label+text",
        "ids": ["\0".join(path) for path in paths], "labels": [escape_html(path[-1]) for path in paths],
        "parents": ["\0".join(path[:-1]) for path in paths], "values": [sizes[path] for path in paths],
        "text": [f"{format_bytes(sizes[path])}, {sizes[path] / ledger.peak_bytes:.1%}" for path in paths],
        "marker": {"colors": [COLOURS[colours[path].most_common(1)[0][0]] for path in paths]},
    }  # fmt: skip
    return make_figure([tree], {"title": {"text": f"Who holds the peak of {format_bytes(ledger.peak_bytes)}"}})


def _draw_ladder(rows: tuple[LadderRow, ...], total_bytes: int | None) -> Figure:
    if not rows:
        raise UsageError("the report has no ladder", value="ladder", hint="ask for one: memprof profile ... --ladder")
    unit = choose_unit(max(row.device_used_bytes for row in rows))
    bars = {
        "type": "bar", "orientation": "h",
        "y": [f"{i}. {f'+ {row.added}' if row.added else 'baseline'}" for i, row in enumerate(rows)],
        "x": [row.device_used_bytes / unit.num_bytes for row in rows],
        "text": [format_bytes(row.device_used_bytes) for row in rows], "textposition": "auto",
        "marker": {"color": [FITS_COLOUR if row.fits else OVER_COLOUR for row in rows]},
        "hovertext": [escape_html(row.cost.note) for row in rows], "hoverinfo": "text",
    }  # fmt: skip
    return make_figure(
        [bars],
        {
            "title": {"text": "What the GPU must have, with one fix more in each row"},
            "yaxis": {"autorange": "reversed", "automargin": True}, "xaxis": {"title": {"text": unit.name}},
            "shapes": [] if total_bytes is None else [_make_line("x", total_bytes / unit.num_bytes, "#c62828")],
        },
    )  # fmt: skip
