"""The document of `memprof compare` as text for a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memprof.report.documents.comparison import (
    ONLY_IN_A,
    ONLY_IN_B,
    SAME,
    Comparison,
    KernelUse,
    Side,
    StageAmounts,
    StageRow,
    TensorRow,
    TensorSide,
)
from memprof.report.terminal.units import Unit, unit_for
from memprof.units import format_bytes

MAX_NAMED = 6
"""Stages named that only one has."""
MAX_VALUE = 44
"""Columns of a setting's value."""


def render_text(document: Comparison, *, width: int = 110, top: int = 10, explain: bool = False) -> str:
    """The comparison without colour, `width` columns wide."""
    console = Console(file=io.StringIO(), width=width, no_color=True, highlight=False, legacy_windows=False)
    console.print(_renderable(document, top=top, explain=explain))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def print_comparison(document: Comparison, *, top: int = 10, explain: bool = False) -> None:
    """Print the comparison to standard output, in colour if it is a terminal."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(_renderable(document, top=top, explain=explain))
    else:
        console.file.write(render_text(document, top=top, explain=explain))


def _renderable(document: Comparison, *, top: int, explain: bool) -> RenderableType:
    unit = unit_for(max((max(row.a_bytes or 0, row.b_bytes or 0) for row in document.totals), default=0))
    parts: list[RenderableType] = [_heading(document), _settings(document), _totals(document, unit)]
    parts += [
        _stages(document, unit, top),
        _categories(document, unit, top),
        _tensors(document, top),
        _kernels(document),
        _reserved(document, unit),
        _findings(document),
    ]
    if explain:
        parts.append(_assumptions(document))
    parts.append(_verdict(document))
    return Group(*parts)


def _heading(document: Comparison) -> RenderableType:
    lines = [Text("memprof compare", style="bold")]
    for letter, side in (("A", document.a), ("B", document.b)):
        lines.append(Text(f"{letter}: {side.file}, {_described(side)}"))
        lines += [Text(f"   {note}", style="dim") for note in side.notes]
    return Group(*lines)


def _described(side: Side) -> str:
    kind = "simulated on a virtual" if side.source == "simulated" else "measured on"
    text = f"{kind} {side.device}" if side.device else "a recording of torch"
    if side.failure is not None:
        return f"{text}; it failed: {side.failure}"
    return text if side.fits is None else f"{text}, {'fits' if side.fits else 'does not fit'}"


def _settings(document: Comparison) -> RenderableType:
    same = f"{document.same_settings} are the same" if document.same_settings else "none is the same"
    if not document.settings:
        return Text(f"\nSettings: no difference ({same}).")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for header in ("setting", "A", "B"):
        table.add_column(header, overflow="fold", max_width=MAX_VALUE)
    for row in document.settings:
        table.add_row(Text(row.name), Text(_value(row.a)), Text(_value(row.b)))
    title = Text("\nSettings that differ", style="bold")
    title.append(f" ({same})", "default")
    return Group(title, Padding(table, (0, 0, 0, 2)))


def _value(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) or "-" if isinstance(value, list | tuple) else str(value)


def _totals(document: Comparison, unit: Unit) -> RenderableType:
    table = _table(unit.name, "A", "B", "difference", "")
    for row in document.totals:
        if row.a_bytes is None and row.b_bytes is None:
            continue
        verdict = Text(f"not compared: {row.why_not}", style="dim")
        if row.compared:
            equal = row.difference_bytes == 0
            verdict = Text("equal" if equal else "within" if row.within else "differs")
            verdict.stylize("green" if row.within else "red")
        table.add_row(row.name, *_three(unit, row.a_bytes, row.b_bytes, row.difference_bytes), verdict)
    return _titled("Totals", f"tolerance {document.tolerance}", table)


def _stages(document: Comparison, unit: Unit, top: int) -> RenderableType:
    shown, rest = _folded(document.stages, top)
    lone = {letter: _only(document.stages, letter) for letter in (ONLY_IN_A, ONLY_IN_B)}
    same = sum(row.status == SAME for row in document.stages)
    notes = [f"{letter}: {names}" for letter, names in lone.items() if names]
    if rest:
        notes.append(f"{rest} more that differ (--top)")
    if not shown:
        text = Text(f"\nStages: the {same} that both have are the same." if same else "\nStages: none in common.")
        return Group(text, *(Text(f"  {note}", style="dim") for note in notes))
    table = _table(f"peak, {unit.name}", "A", "B", "difference", "change A", "change B")
    timed = document.seconds_a is not None or document.seconds_b is not None
    if timed:
        for header in ("seconds A", "B"):
            table.add_column(header, justify="right", no_wrap=True)
    for name, group in shown:
        a, b = ([row.a for row in group], [row.b for row in group])
        peak_a, peak_b = (max(_amounts(side, lambda one: one.peak_allocated_bytes)) for side in (a, b))
        changes = [sum(_amounts(side, lambda one: one.delta_bytes or 0)) for side in (a, b)]
        cells = [name, *_three(unit, peak_a, peak_b, peak_b - peak_a)]
        cells += [unit.amount(one, sign=True) for one in changes]
        if timed:
            cells += [_seconds(side) for side in (a, b)]
        table.add_row(*cells)
    return _titled("Stages", f"largest differences first; {same} are the same", table, notes)


def _amounts(side: Iterable[StageAmounts | None], value: Callable[[StageAmounts], int]) -> list[int]:
    return [value(one) for one in side if one is not None]


def _seconds(side: list[StageAmounts | None]) -> str:
    known = [one.seconds for one in side if one is not None and one.seconds is not None]
    return f"{sum(known):.3f}" if known else "-"


def _folded(stages: tuple[StageRow, ...], top: int) -> tuple[list[tuple[str, list[StageRow]]], int]:
    """Stages that differ, layers of one stack as one row, largest difference first; and how many are left out."""
    differing = sorted((row for row in stages if row.a and row.b and row.status != SAME), key=lambda row: row.order)

    def run(row: StageRow) -> tuple[object, ...]:
        return (row.step, row.micro_batch, row.stack) if row.stack else (row.order,)

    groups = [list(rows) for _, rows in groupby(differing, key=run)]
    groups.sort(key=lambda rows: -max(abs(row.difference_bytes or 0) for row in rows))
    named = [(_stage_name(rows), rows) for rows in groups]
    return named[:top], len(named) - len(named[:top])


def _stage_name(rows: list[StageRow]) -> str:
    first = rows[0]
    name = first.name
    if len(rows) > 1:
        name = f"{first.name.rpartition(' ')[0]}s {first.index}-{rows[-1].index}"
    step = f" of step {first.step}" if first.step else ""
    return name + step + (f", micro-batch {first.micro_batch}" if first.micro_batch > 1 else "")


def _only(stages: tuple[StageRow, ...], status: str) -> str:
    """Names of the stages that only one has."""
    rows = sorted((row for row in stages if row.status == status), key=lambda row: row.order)
    groups = [
        list(own) for _, own in groupby(rows, key=lambda row: (row.step, row.micro_batch, row.stack or row.order))
    ]
    names = [_stage_name(own) for own in groups]
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _categories(document: Comparison, unit: Unit, top: int) -> RenderableType:
    differing = [row for row in document.categories if row.difference_bytes]
    if not differing:
        return Text("\nCategories at the peak: no difference.")
    table = _table(unit.name, "A", "B", "difference")
    for row in document.categories[:top]:
        table.add_row(row.category, *_three(unit, row.a_bytes, row.b_bytes, row.difference_bytes))
    return _titled("Categories", "at each one's own peak, without kernels' own memory", table)


def _tensors(document: Comparison, top: int) -> RenderableType:
    same = f"{document.same_tensors} rows, {format_bytes(document.same_tensors_bytes)}, are the same"
    if not document.tensors:
        return Text(f"\nTensors at the peak: no difference ({same}).")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("difference", justify="right", no_wrap=True)
    for header in ("what", "A", "B"):
        table.add_column(header, overflow="fold")
    differing = [row for row in document.tensors if row.difference_bytes]
    for row in differing[:top]:
        table.add_row(_signed(row.difference_bytes), _place(row), _tensor(row, row.a), _tensor(row, row.b))
    notes = [f"{len(differing) - top} more (--top; --json has all)"] if len(differing) > top else []
    if alike := len(document.tensors) - len(differing):
        notes.append(f"{alike} more with the same bytes, but another operator or shape (--json)")
    if not differing:
        return Text(f"\nTensors at the peak: no difference in bytes ({same}; {notes[-1]}).")
    return _titled("Tensors at the peak", f"matched by {document.tensors_matched_by}; {same}", table, notes)


def _place(row: TensorRow) -> Text:
    text = Text(row.category)
    if row.where:
        text.append(f" {row.where}")
    known = row.a or row.b
    if row.status != "operator" and known is not None:
        text.append(f" {known.op.removeprefix('aten.')}", style="dim")
    return text


def _tensor(row: TensorRow, side: TensorSide | None) -> Text:
    if side is None:
        return Text("-", style="dim")
    what = format_bytes(side.num_bytes) if side.shape is None else f"{'x'.join(map(str, side.shape))} {side.dtype}"
    text = Text(f"{side.count} x {what}")
    if row.status == "operator":
        text.append(f" {side.op}", style="dim")
    return text


def _kernels(document: Comparison) -> RenderableType:
    lines = []
    for letter, use in (("A", document.kernels_a), ("B", document.kernels_b)):
        if use.num_bytes:
            lines.append(Text(f"  {letter}: {use.kind}, {format_bytes(use.num_bytes)}: {_kernel_names(use)}"))
    if not lines:
        return Text("\nKernels' own memory at the peak: none.")
    title = Text("\nKernels' own memory at the peak", style="bold")
    title.append(" (in no category and no tensor above)", "default")
    return Group(title, *lines)


def _kernel_names(use: KernelUse) -> str:
    sums: dict[str, int] = {}
    for one in use.tensors:
        sums[one.op] = sums.get(one.op, 0) + one.num_bytes * one.count
    named = sorted(sums.items(), key=lambda item: -item[1])
    more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    return ", ".join(f"{op} {format_bytes(num_bytes)}" for op, num_bytes in named[:MAX_NAMED]) + more


def _reserved(document: Comparison, unit: Unit) -> RenderableType:
    if not any(row.difference_bytes for row in document.reserved):
        known = any(row.difference_bytes is not None for row in document.reserved)
        text = "no difference" if known else "only one has any" if document.reserved else "not known"
        return Text(f"\nReserved memory and fragmentation: {text}.")
    table = _table(unit.name, "A", "B", "difference")
    for row in document.reserved:
        if not row.a_bytes and not row.b_bytes:
            continue
        table.add_row(row.name, *_three(unit, row.a_bytes, row.b_bytes, row.difference_bytes))
    return _titled("Reserved memory and fragmentation", "where most is reserved", table)


def _findings(document: Comparison) -> RenderableType:
    if not document.findings:
        return Text("\nFindings: no difference." if document.findings is not None else "\nFindings: only one has any.")
    title = Text("\nFindings that differ", style="bold")
    lines = []
    for row in document.findings:
        if row.in_a and row.in_b:
            amounts = ["no bytes" if one is None else format_bytes(one) for one in (row.a_bytes, row.b_bytes)]
            change = f"{amounts[0]} -> {amounts[1]}"
        else:
            known = row.a_bytes if row.in_a else row.b_bytes
            about = "" if known is None else f", {format_bytes(known)}"
            change = f"only in {'A' if row.in_a else 'B'}{about}"
        lines.append(Text(f"  {row.id}: {change}"))
    return Group(title, *lines)


def _assumptions(document: Comparison) -> RenderableType:
    lines = []
    for letter, own in (("A", document.assumptions_only_in_a), ("B", document.assumptions_only_in_b)):
        lines += [Text(f"  - {letter}: {sentence}") for sentence in own]
    title = Text("\nAssumptions of only one", style="bold")
    return Group(title, *lines) if lines else Text("\nAssumptions: no difference.")


def _verdict(document: Comparison) -> RenderableType:
    compared = [row for row in document.totals if row.compared]
    beyond = [row.name for row in compared if not row.within]
    if beyond:
        by = f" by more than {document.tolerance}" if document.tolerance != "0" else ""
        return Text(f"\n{len(beyond)} of {len(compared)} totals differ{by}: {', '.join(beyond)}.", style="bold red")
    if not compared:
        return Text("\nNo total is known of both.", style="bold yellow")
    equal = all(row.difference_bytes == 0 for row in compared)
    words = "are equal, to the byte" if equal else f"are within {document.tolerance}"
    return Text(f"\nAll {len(compared)} totals that are compared {words}.", style="bold green")


def _table(*headers: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for position, header in enumerate(headers):
        justify = "right" if position and header else "left"
        table.add_column(header, justify=justify, no_wrap=justify == "right", overflow="fold")  # type: ignore[arg-type]
    return table


def _three(unit: Unit, a: int | None, b: int | None, difference: int | None) -> list[str]:
    shown = ["-" if one is None else unit.amount(one) for one in (a, b)]
    return [*shown, "-" if difference is None else _signed(difference)]


def _signed(difference: int) -> str:
    """A difference in its own unit: never shown as nothing when there is one."""
    return ("+" if difference > 0 else "-" if difference else "") + format_bytes(abs(difference))


def _titled(title: str, what: str, table: Table, notes: Iterable[str] = ()) -> RenderableType:
    heading = Text(f"\n{title}", style="bold")
    heading.append(f" ({what})", "default")
    return Group(heading, Padding(table, (0, 0, 0, 2)), *(Text(f"  {note}", style="dim") for note in notes))
