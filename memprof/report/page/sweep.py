"""Sections of a sweep's HTML page: a heat map per pair of axes, with the frontier of what fits, and the cells."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from memprof.report.documents.sweep import Sweep, SweepAxis, SweepRow
from memprof.report.page.figures import escape_html
from memprof.report.page.sections import PageCell, Section
from memprof.report.terminal.cells import format_seconds
from memprof.report.terminal.sweep import format_axis_name, format_axis_value, format_needed, format_verdict, varies
from memprof.units import gib

_MAX_MAPS = 36  # Heat maps of one pair of axes: each is a figure to draw.
_MAX_ROWS = 20_000
_TILE_PIXELS = 44
_FRONTIER = "#14181c"  # Seen on tiles of all colours, which are the same on a dark page.
_EDGE = 1e-3  # Keeps the colour of a tile on the side of its verdict.
# Share of the GPU: green up to its capacity, red beyond.
_FITS_SCALE = ((0.0, "#e3f0e0"), (0.5, "#4f9a45"), (0.5, "#f2b8b5"), (1.0, "#b3261e"))
_SHARE_SCALE = ((0.0, "#f2b8b5"), (0.01, "#e3f0e0"), (1.0, "#4f9a45"))


def build_sweep_sections(document: Sweep) -> list[Section]:
    """Return the sections of a sweep's page: heat maps, then the table of cells."""
    sections = [*_draw_maps(document)]
    rows = document.rows[:_MAX_ROWS]
    more = len(document.rows) - len(rows)
    note = f"{more:,} more cells are in --csv and --json." if more else ""
    axes = tuple(f"{'>' * axis.is_size}{format_axis_name(axis)}" for axis in document.axes)
    columns = (*axes, ">needs, GiB", "verdict", ">headroom, GiB", ">step", "fixes", "answered by", "why", "$command")
    return [*sections, Section("Cells", note, columns=columns, rows=tuple(_make_row(document, row) for row in rows))]


def _make_row(document: Sweep, row: SweepRow) -> tuple[PageCell, ...]:
    answer = row.answer
    values: list[PageCell] = [
        (format_axis_value(axis, value), int(value)) if axis.is_size else value
        for axis, value in zip(document.axes, row.values, strict=True)
    ]
    headroom, step = answer.headroom_bytes, answer.step_seconds
    return (
        *values,
        (format_needed(answer), answer.needed_bytes),
        format_verdict(row),
        ("-" if headroom is None else gib(headroom), headroom),
        ("-" if step is None else format_seconds(step, 1), step),
        ", ".join(answer.fixes),
        answer.how + ", cached" * answer.cached,
        answer.reason,
        row.command,
    )


def _draw_maps(document: Sweep) -> Iterator[Section]:
    places = [place for place, axis in enumerate(document.axes) if varies(axis)]
    if len(places) == 1:
        places = [*places, *(place for place in range(len(document.axes)) if place not in places)][:2]
    sizes = [place for place in places if document.axes[place].is_size]
    pairs = [*itertools.combinations(places, 2)]
    # The pair along which more tokens need more memory comes first, with a map for each line of the grid.
    pairs.sort(key=lambda pair: -sum(place in sizes for place in pair))
    for pair in pairs:
        others = [place for place in places if place not in pair]
        if not others or all(place in sizes for place in pair):
            yield from _draw_cell_maps(document, pair, others)
        else:
            yield _draw_share_map(document, pair)


def _draw_cell_maps(document: Sweep, pair: tuple[int, int], others: Sequence[int]) -> Iterator[Section]:
    """Yield a heat map of single cells for each combination of the other axes."""
    facets: dict[tuple[str, ...], dict[tuple[str, str], SweepRow]] = {}
    for row in document.rows:
        tiles = facets.setdefault(tuple(row.values[place] for place in others), {})
        tiles[row.values[pair[0]], row.values[pair[1]]] = row
    for number, (key, tiles) in enumerate(facets.items()):
        title = ", ".join(_name_value(document.axes[place], value) for place, value in zip(others, key, strict=True))
        if number == _MAX_MAPS:
            yield Section(f"{len(facets) - _MAX_MAPS:,} more", text="They are in the table of cells.")
            return
        note = "GiB, and as colour the share of the GPU's memory; the line is the frontier of what fits."
        y_axis, x_axis = (document.axes[place] for place in pair)
        z, texts, hovers = [], [], []
        for y in y_axis.values:
            line = [tiles[y, x] for x in x_axis.values]
            z.append([_compute_colour(row) for row in line])
            texts.append([format_needed(row.answer) for row in line])
            hovers.append([_describe(document, row) for row in line])
        trace = {
            "zmin": 0, "zmax": 2, "colorscale": _FITS_SCALE, "text": texts, "texttemplate": "%{text}",
            "colorbar": {"tickvals": [0, 1, 2], "ticktext": ["0%", "100%", "200%"], "thickness": 12},
        }  # fmt: skip
        shapes = _draw_frontier(y_axis, x_axis, tiles)
        yield Section(
            title or "Cells", "" if number else note, **_draw_heat_map(y_axis, x_axis, z, hovers, trace, shapes)
        )


def _name_value(axis: SweepAxis, value: str) -> str:
    """Return a value with the name of its axis, unless the value says that itself: a model, a GPU, its memory."""
    if axis.name == "gpu_vram_bytes":
        return f"{value} GiB"
    return value if axis.name in ("model", "gpu") else f"{format_axis_name(axis)} {format_axis_value(axis, value)}"


def _draw_share_map(document: Sweep, pair: tuple[int, int]) -> Section:
    """Return a heat map of the share of cells that fit, over all values of the other axes."""
    y_axis, x_axis = (document.axes[place] for place in pair)
    tiles: dict[tuple[str, str], list[SweepRow]] = {}
    for row in document.rows:
        tiles.setdefault((row.values[pair[0]], row.values[pair[1]]), []).append(row)
    z, texts, hovers = [], [], []
    for y in y_axis.values:
        lines = [tiles[y, x] for x in x_axis.values]
        counts = [sum(row.answer.fits is True for row in rows) for rows in lines]
        z.append([count / len(rows) for count, rows in zip(counts, lines, strict=True)])
        texts.append([f"{count} of {len(rows)}" for count, rows in zip(counts, lines, strict=True)])
        hovers.append([_describe_all(document, rows) for rows in lines])
    trace = {
        "zmin": 0,
        "zmax": 1,
        "colorscale": _SHARE_SCALE,
        "text": texts,
        "texttemplate": "%{text}",
        "showscale": False,
    }
    names = " and ".join(format_axis_name(axis) for axis in (y_axis, x_axis))
    return Section(
        f"Cells that fit, by {names}", "Over all values of the other axes.",
        **_draw_heat_map(y_axis, x_axis, z, hovers, trace, []),
    )  # fmt: skip


def _draw_heat_map(
    y_axis: SweepAxis, x_axis: SweepAxis, z: list[Any], hovers: list[Any], trace: dict[str, Any], shapes: list[Any]
) -> dict[str, Any]:
    """Return traces and layout of a heat map, with the first value of `y_axis` at the top."""
    axes = {
        letter: {
            "type": "category", "title": {"text": escape_html(format_axis_name(axis)), "standoff": 12},
            "fixedrange": True, **({"autorange": "reversed"} if letter == "y" else {}),
        }
        for letter, axis in (("x", x_axis), ("y", y_axis))
    }  # fmt: skip
    labels = {
        letter: [escape_html(format_axis_value(axis, value)) for value in axis.values]
        for letter, axis in (("x", x_axis), ("y", y_axis))
    }
    heat_map = {
        "type": "heatmap", **labels, "z": z, "hovertext": hovers, "hoverinfo": "text", "xgap": 1, "ygap": 1, **trace,
    }  # fmt: skip
    height = 110 + _TILE_PIXELS * len(y_axis.values)
    return {
        "traces": [heat_map],
        "layout": {"height": height, "xaxis": axes["x"], "yaxis": axes["y"], "shapes": shapes, "showlegend": False},
    }


def _compute_colour(row: SweepRow) -> float | None:
    """Return the share of the GPU that a cell needs, at most 2, on the side of its verdict; None: no verdict."""
    answer = row.answer
    if answer.fits is None or answer.needed_bytes is None or answer.headroom_bytes is None:
        return None
    share = answer.needed_bytes / (answer.needed_bytes + answer.headroom_bytes)
    return min(share, 1 - _EDGE) if answer.fits else min(max(share, 1 + _EDGE), 2.0)


def _draw_frontier(
    y_axis: SweepAxis, x_axis: SweepAxis, tiles: dict[tuple[str, str], SweepRow]
) -> list[dict[str, Any]]:
    """Return lines between each tile that fits and a neighbour that does not, in positions of categories."""
    fits = [[tiles[y, x].answer.fits is True for x in x_axis.values] for y in y_axis.values]
    lines = []
    for y, x in itertools.product(range(len(y_axis.values)), range(len(x_axis.values))):
        if x + 1 < len(x_axis.values) and fits[y][x] != fits[y][x + 1]:
            lines.append((x + 0.5, y - 0.5, x + 0.5, y + 0.5))
        if y + 1 < len(y_axis.values) and fits[y][x] != fits[y + 1][x]:
            lines.append((x - 0.5, y + 0.5, x + 0.5, y + 0.5))
    return [
        {"type": "line", "xref": "x", "yref": "y", "x0": x0, "y0": y0, "x1": x1, "y1": y1,
         "line": {"width": 3, "color": _FRONTIER}}
        for x0, y0, x1, y1 in lines
    ]  # fmt: skip


def _describe(document: Sweep, row: SweepRow) -> str:
    answer = row.answer
    lines = [
        ", ".join(
            f"{format_axis_name(axis)} {format_axis_value(axis, value)}"
            for axis, value in zip(document.axes, row.values, strict=True)
        ),
        f"{format_verdict(row)}: needs {format_needed(answer)} GiB"
        + ("" if answer.headroom_bytes is None else f", headroom {gib(answer.headroom_bytes)} GiB")
        + ("" if answer.step_seconds is None else f", step at least {format_seconds(answer.step_seconds, 1)}"),
        *([f"with {', '.join(answer.fixes)}"] if answer.fixes else []),
        f"{answer.how}: {answer.reason}",
    ]
    return "<br>".join(escape_html(line) for line in lines)


def _describe_all(document: Sweep, rows: Sequence[SweepRow]) -> str:
    largest = [row for row in rows if row.on_frontier][:5]
    lines = [f"{sum(row.answer.fits is True for row in rows)} of {len(rows)} cells fit"]
    lines += [
        "largest: " + ", ".join(format_axis_value(axis, v) for axis, v in zip(document.axes, row.values, strict=True))
        for row in largest
    ]
    return "<br>".join(escape_html(line) for line in lines)
