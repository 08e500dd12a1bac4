"""The result of `memprof sweep` as text for a terminal: the verdict, the frontier, and with `full` all cells."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.report.documents.sweep import CellAnswer, Sweep, SweepAxis, SweepRow
from memprof.report.terminal.cells import format_seconds, join_first
from memprof.report.terminal.console import AlignedLines, dim, make_heading, make_section
from memprof.units import gib

_MAX_ROWS = 22  # Rows of a table without --full: the whole is at most 40 lines.
_MAX_FAILED, _MAX_LARGEST = 4, 4
_COLUMNS = 100
_LONGEST_WORD = 12  # Columns that a line may lose where it wraps.
_LABELS = {
    "model": "models", "gpu": "GPUs", "gpu_vram_bytes": "GPUs", "gpus": "numbers of GPUs", "fix": "kinds of fixes",
    "context_length": "context lengths", "batch_size": "batch sizes", "dtype": "dtypes", "optimizer": "optimizers",
}  # fmt: skip
_BOUNDS = {"": "", "about": "~", "at most": "<= ", "at least": ">= "}


def render(document: Sweep, *, quiet: bool = False, full: bool = False, explain: bool = False) -> RenderableType:
    """Return a sweep for a terminal; `quiet` leaves the verdict, `full` has every cell with its reason."""
    verdict = _render_verdict(document)
    if quiet:
        return verdict
    parts: list[RenderableType] = [render_axes(document), verdict]
    is_small = len(document.rows) <= _MAX_ROWS
    if full or is_small:
        parts.append(_render_cells(document, document.rows, full=full))
    if not is_small:
        parts.append(_render_frontier(document, full=full))
    parts += _render_failed(document, full=full)
    if explain:
        parts.append(make_section("Assumptions", *map(Text, document.assumptions or ("every cell was run",)), below=1))
    if not full:
        exact = ", --exact (run all)" if document.count("estimate") + document.count("monotony") else ""
        parts.append(dim(f"More: --full (every cell, and why), --html, --csv, --parquet, --explain{exact}"))
    return Group(*parts)


def describe_verdict(document: Sweep) -> str:
    """Return how many cells fit."""
    num_failed, num_left = document.num_failed, document.count("left")
    text = f"{document.num_fitting:,} of {len(document.rows):,} cells fit"
    if num_failed:
        text += f", {num_failed:,} failed"
    return text + (f", {num_left:,} are left" if num_left else "")


def _render_verdict(document: Sweep) -> RenderableType:
    counts = [f"{document.count(how):,} {name}" for how, name in _HOW_NAMES.items() if document.count(how)]
    num_cached = sum(row.answer.cached for row in document.rows)
    cached = f", {num_cached:,} of an earlier sweep" if num_cached else ""
    style = "bold green" if document.num_fitting else "bold red"
    lines = [Text(f"{describe_verdict(document)}.", style=style)]
    if counts:
        lines.append(dim(f"{', '.join(counts)}{cached}, in {format_seconds(document.seconds, 1)}"))
    if document.ended != "complete":
        why = "interrupted" if document.ended == "interrupted" else "stopped"
        note = f": {document.note}" if document.note else ""
        go_on = "" if document.store is None else "; the same command goes on from the answers so far"
        lines.append(Text(f"The sweep was {why}{note}{go_on}.", style="yellow"))
    elif document.note:
        lines.append(Text(f"{document.note}.", style="yellow"))
    return Group(*lines, Text(""))


_HOW_NAMES = {
    "run": "run on the virtual GPU", "estimate": "by the analytical estimate",
    "monotony": "by runs of larger or smaller ones",
}  # fmt: skip


def render_axes(document: Sweep) -> RenderableType:
    """Return the number of cells, and their axes."""
    sizes = [f"{len(axis.values):,} {_LABELS.get(axis.name, axis.name)}" for axis in document.axes if varies(axis)]
    constants = [f"{format_axis_name(axis)} {axis.values[0]}" for axis in document.axes if not varies(axis)]
    lines = [f"{len(document.rows):,} cells" + (f": {' x '.join(sizes)}" if sizes else "")]
    text = make_heading("memprof sweep", f": {lines[0]}")
    return Group(text, *([Text(f"all with {', '.join(constants)}")] if constants else []))


def varies(axis: SweepAxis) -> bool:
    """Return whether an axis has several values."""
    return len(axis.values) > 1


def format_axis_name(axis: SweepAxis) -> str:
    """Return the name of an axis in words."""
    return "capacity, GiB" if axis.name == "gpu_vram_bytes" else axis.name.replace("_", " ")


def format_axis_value(axis: SweepAxis, value: str) -> str:
    """Return a value of an axis, a number with thousands apart."""
    return f"{int(value):,}" if axis.is_size else value


def _render_cells(document: Sweep, rows: Sequence[SweepRow], *, full: bool) -> RenderableType:
    shown = [place for place, axis in enumerate(document.axes) if varies(axis)]
    axes = [document.axes[place] for place in shown]
    headers = [f"{'>' * axis.is_size}{format_axis_name(axis)}" for axis in axes]
    headers += [">needs, GiB", "verdict", ">headroom", ">step", "answered by", "why" if full else "fixes"]
    cells = [
        (
            *(format_axis_value(axis, row.values[place]) for axis, place in zip(axes, shown, strict=True)),
            *_format_answer(row, full=full),
        )
        for row in rows
    ]
    if not full and not any(row.answer.fixes for row in rows):
        headers, cells = headers[:-1], [cell[:-1] for cell in cells]
    legend = (
        "* the largest that fit. step: the least time at this GPU's published rates. ~ about, <= at most, >= at least: "
        "not run."
    )
    return make_section(
        "Cells", AlignedLines(headers, cells, optional=("answered by", "headroom", "step")), dim(legend), below=1
    )


def _format_answer(row: SweepRow, *, full: bool) -> tuple[str, ...]:
    answer, fixes = row.answer, "+".join(row.answer.fixes)
    return (
        format_needed(answer),
        format_verdict(row) + " *" * row.on_frontier,
        "-" if answer.headroom_bytes is None else gib(answer.headroom_bytes),
        "-" if answer.step_seconds is None else format_seconds(answer.step_seconds, 1),
        answer.how + ", cached" * answer.cached,
        f"{fixes and f'with {fixes}; '}{answer.reason}" if full else fixes,
    )


def format_verdict(row: SweepRow) -> str:
    """Return whether a cell fits, in a word."""
    if row.answer.fits is None:
        return "failed" if row.has_failed else "left"
    return "fits" if row.answer.fits else "pages" if row.answer.pages else "OOM"


def format_needed(answer: CellAnswer) -> str:
    """Return the GPU memory that a cell needs in GiB, with a sign before a figure that is a bound."""
    return "-" if answer.needed_bytes is None else f"{_BOUNDS[answer.bound]}{gib(answer.needed_bytes)}"


def _render_frontier(document: Sweep, *, full: bool) -> RenderableType:
    """Return a row for each line of the grid, with its largest cells that fit."""
    places = [place for place, axis in enumerate(document.axes) if not axis.is_size and varies(axis)]
    sizes = [place for place, axis in enumerate(document.axes) if axis.is_size]
    largest: dict[tuple[str, ...], list[SweepRow]] = {}
    for row in document.rows:
        found = largest.setdefault(tuple(row.values[place] for place in places), [])
        if row.on_frontier:
            found.append(row)
    name = " x ".join(format_axis_name(document.axes[place]) for place in sizes) or "cell"

    def describe(row: SweepRow) -> str:
        size = " x ".join(format_axis_value(document.axes[place], row.values[place]) for place in sizes) or "it"
        fixes = f" with {'+'.join(row.answer.fixes)}" if row.answer.fixes else ""
        step = row.answer.step_seconds
        time = "" if step is None else f", {format_seconds(step, 0 if step < 1 else 1)}"
        return f"{size} ({format_needed(row.answer)} GiB{time}{fixes})"

    lines = [
        (*key, join_first([describe(row) for row in rows], len(rows) if full else _MAX_LARGEST) or "none")
        for key, rows in largest.items()
    ]
    shown = lines if full else lines[: _count_rows(lines)]
    headers = [*(format_axis_name(document.axes[place]) for place in places), f"{name} (GPU memory, least step time)"]
    more = f"{len(lines) - len(shown):,} more rows: --full" if len(lines) > len(shown) else ""
    return make_section("The largest that fit", AlignedLines(headers, shown), *([dim(more)] if more else []), below=1)


def _count_rows(rows: Sequence[tuple[str, ...]]) -> int:
    """Return how many of `rows`, whose last cell wraps at 100 columns, take `_MAX_ROWS` lines together at most."""
    room = max(
        _COLUMNS - sum(max(map(len, column)) + 2 for column in list(zip(*rows, strict=True))[:-1]), _COLUMNS // 3
    )
    ends = itertools.accumulate(-(-len(row[-1]) // (room - _LONGEST_WORD)) for row in rows)
    return sum(end <= _MAX_ROWS for end in ends)


def _render_failed(document: Sweep, *, full: bool) -> list[RenderableType]:
    reasons: dict[str, list[SweepRow]] = {}
    for row in document.rows:
        if row.has_failed:
            reasons.setdefault(row.answer.reason, []).append(row)
    lines = []
    for reason, rows in [*reasons.items()][: None if full else _MAX_FAILED]:
        varying = [place for place, axis in enumerate(document.axes) if varies(axis)]
        example = " ".join(rows[0].values[place] for place in varying)
        more = f" and {len(rows) - 1:,} more" if len(rows) > 1 else ""
        lines.append(Text(f"{example}{more}: {reason}".removeprefix(": ")))
    if len(reasons) > len(lines):
        lines.append(dim(f"{len(reasons) - len(lines):,} more reasons: --full"))
    return [make_section("No verdict", *lines, below=1)] if lines else []
