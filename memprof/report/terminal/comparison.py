"""The document of `memprof compare` as text for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memprof.ledger.stages import at_stage
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
from memprof.report.terminal.cells import Unit, join_some, signed_bytes, tensor_text, total_verdict, unit_for
from memprof.report.terminal.console import dim, heading, section, table
from memprof.report.terminal.next_step import after_comparison, render_next
from memprof.units import format_bytes

T = TypeVar("T", int, float)
MAX_NAMED = 6  # Stages named that only one has.


def view(
    document: Comparison, *, top: int = 10, explain: bool = False, quiet: bool = False, files: tuple[Path, ...] = ()
) -> RenderableType:
    """Return the whole comparison, with `top` rows per table; with `explain`, also the assumptions of only one run.

    With `quiet`, only the verdict; with `files`, A and B, the command to try next.
    """
    if quiet:
        return _verdict(document)
    unit = unit_for(max((max(row.a_bytes or 0, row.b_bytes or 0) for row in document.totals), default=0))
    parts = [render_heading(document), _settings(document), _totals(document, unit), _stages(document, unit, top)]
    parts += [_categories(document, unit, top), _tensors(document, top), _kernels(document)]
    parts += [_reserved(document, unit), _findings(document), *([_assumptions(document)] if explain else [])]
    return Group(*parts, _verdict(document), *render_next(after_comparison(document, files)))


def render_heading(document: Comparison) -> RenderableType:
    """Return the two files, and their kinds of runs."""
    lines = [heading("memprof compare")]
    for letter, side in (("A", document.a), ("B", document.b)):
        lines.append(Text(f"{letter}: {side.file}, {_described(side)}"))
        lines += [dim(f"   {note}") for note in side.notes]
    if document.other_moments:
        moments = f"A's is in {document.a.peak_at}, B's in {document.b.peak_at}"
        lines.append(Text(f"The peaks are different moments: {moments}.", style="yellow"))
    return Group(*lines)


def _described(side: Side) -> str:
    kind = "simulated on a virtual" if side.source == "simulated" else "measured on"
    recording = "an export of a simulated run" if side.source == "simulated" else "a recording of torch"
    text = f"{kind} {side.device}" if side.device else recording
    if side.failure is not None:
        return f"{text}; it failed: {side.failure}"
    return text if side.fits is None else f"{text}, {'fits' if side.fits else 'does not fit'}"


def _settings(document: Comparison) -> RenderableType:
    same = f"{document.same_settings} are the same" if document.same_settings else "none is the same"
    if not document.settings:
        return Text(f"\nSettings: no difference ({same}).")
    made = table("~setting", "~A", "~B")
    for row in document.settings:
        made.add_row(Text(row.name), Text(_value(row.a)), Text(_value(row.b)))
    return _titled_table("Settings that differ", same, made)


def _value(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) or "-" if isinstance(value, list | tuple) else str(value)


def _totals(document: Comparison, unit: Unit) -> RenderableType:
    made = _comparison_table(unit.name, "~")
    for row in document.totals:
        if row.a_bytes is None and row.b_bytes is None:
            continue
        verdict = Text(total_verdict(row), style="dim" if not row.compared else "green" if row.within else "red")
        made.add_row(row.name, *_three(unit, row.a_bytes, row.b_bytes, row.difference_bytes), verdict)
    return _titled_table("Totals", f"tolerance {document.tolerance}", made)


def _stages(document: Comparison, unit: Unit, top: int) -> RenderableType:
    # Stages that differ, layers of one stack as one row, largest difference first.
    groups = _stacks(row for row in document.stages if row.a and row.b and row.status != SAME)
    groups.sort(key=lambda rows: -max(abs(row.difference_bytes or 0) for row in rows))
    lone = {one: _stacks(row for row in document.stages if row.status == one) for one in (ONLY_IN_A, ONLY_IN_B)}
    same = sum(row.status == SAME for row in document.stages)
    notes = [f"{status}: {join_some(list(map(_stage_name, own)), MAX_NAMED)}" for status, own in lone.items() if own]
    if groups[top:]:
        notes.append(f"{len(groups[top:])} more that differ (--top)")
    if not groups[:top]:
        text = Text(f"\nStages: the {same} that both have are the same." if same else "\nStages: none in common.")
        return Group(text, *(dim(f"  {note}") for note in notes))
    timed = document.seconds_a is not None or document.seconds_b is not None
    made = _comparison_table(f"peak, {unit.name}", ">change A", ">change B", *([">seconds A", ">B"] if timed else []))
    for group in groups[:top]:
        a, b = ([row.a for row in group], [row.b for row in group])
        peak_a, peak_b = (max(_amounts(side, lambda one: one.peak_allocated_bytes)) for side in (a, b))
        changes = [sum(_amounts(side, lambda one: one.delta_bytes)) for side in (a, b)]
        seconds = [_amounts(side, lambda one: one.seconds) for side in (a, b)] if timed else []
        made.add_row(
            _stage_name(group),
            *_three(unit, peak_a, peak_b, peak_b - peak_a),
            *(unit.amount(one, sign=True) for one in changes),
            *(f"{sum(known):.3f}" if known else "-" for known in seconds),
        )
    return _titled_table("Stages", f"largest differences first; {same} are the same", made, notes)


def _amounts(side: Iterable[StageAmounts | None], value: Callable[[StageAmounts], T | None]) -> list[T]:
    return [known for one in side if one is not None and (known := value(one)) is not None]


def _stacks(rows: Iterable[StageRow]) -> list[list[StageRow]]:
    """Return rows in the order of the run, grouped by stack of layers."""
    ordered = sorted(rows, key=lambda row: row.order)
    stacks = groupby(ordered, key=lambda row: (row.step, row.micro_batch, row.stack or row.order))
    return [list(own) for _, own in stacks]


def _stage_name(rows: list[StageRow]) -> str:
    first = rows[0]
    several = f"{first.name.rpartition(' ')[0]}s {first.index}-{rows[-1].index}"
    name = several if len(rows) > 1 else first.name
    return at_stage(name, first.step, first.micro_batch)


def _categories(document: Comparison, unit: Unit, top: int) -> RenderableType:
    differing = [row for row in document.categories if row.difference_bytes]
    if not differing:
        return Text("\nCategories at the peak: no difference.")
    made = _comparison_table(unit.name)
    for row in document.categories[:top]:
        made.add_row(row.category, *_three(unit, row.a_bytes, row.b_bytes, row.difference_bytes))
    return _titled_table("Categories", "at each one's own peak, without kernels' own memory", made)


def _tensors(document: Comparison, top: int) -> RenderableType:
    same = f"{document.same_tensors} rows, {format_bytes(document.same_tensors_bytes)}, are the same"
    if not document.tensors:
        return Text(f"\nTensors at the peak: no difference ({same}).")
    made = table(">difference", "~what", "~A", "~B", drop=("A", "B"))
    differing = [row for row in document.tensors if row.difference_bytes]
    for row in differing[:top]:
        made.add_row(signed_bytes(row.difference_bytes), _place(row), _tensor(row, row.a), _tensor(row, row.b))
    notes = [f"{len(differing) - top} more (--top; --json has all)"] if len(differing) > top else []
    if alike := len(document.tensors) - len(differing):
        notes.append(f"{alike} more with the same bytes, but another operator or shape (--json)")
    if not differing:
        return Text(f"\nTensors at the peak: no difference in bytes ({same}; {notes[-1]}).")
    return _titled_table("Tensors at the peak", f"matched by {document.tensors_matched_by}; {same}", made, notes)


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
        return dim("-")
    text = Text(tensor_text(side))
    if row.status == "operator":
        text.append(f" {side.op}", style="dim")
    return text


def _kernels(document: Comparison) -> RenderableType:
    lines = [
        Text(f"  {letter}: {use.kind}, {format_bytes(use.num_bytes)}: {_kernel_names(use)}")
        for letter, use in (("A", document.kernels_a), ("B", document.kernels_b))
        if use.num_bytes
    ]
    if not lines:
        return Text("\nKernels' own memory at the peak: none.")
    return Group(heading("\nKernels' own memory at the peak", " (in no category and no tensor above)"), *lines)


def _kernel_names(use: KernelUse) -> str:
    sums = Counter[str]()
    for one in use.tensors:
        sums[one.op] += one.total_bytes
    return join_some([f"{op} {format_bytes(num_bytes)}" for op, num_bytes in sums.most_common()], MAX_NAMED)


def _reserved(document: Comparison, unit: Unit) -> RenderableType:
    if not any(row.difference_bytes for row in document.reserved):
        known = any(row.difference_bytes is not None for row in document.reserved)
        text = "no difference" if known else "only one has any" if document.reserved else "not known"
        return Text(f"\nReserved memory and fragmentation: {text}.")
    made = _comparison_table(unit.name)
    for row in document.reserved:
        if row.a_bytes or row.b_bytes:
            made.add_row(row.name, *_three(unit, row.a_bytes, row.b_bytes, row.difference_bytes))
    return _titled_table("Reserved memory and fragmentation", "where most is reserved", made)


def _findings(document: Comparison) -> RenderableType:
    if not document.findings:
        return Text("\nFindings: no difference." if document.findings is not None else "\nFindings: only one has any.")
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
    return Group(heading("\nFindings that differ"), *lines)


def _assumptions(document: Comparison) -> RenderableType:
    sides = (("A", document.assumptions_only_in_a), ("B", document.assumptions_only_in_b))
    lines = [Text(f"  - {letter}: {sentence}") for letter, own in sides for sentence in own]
    return Group(heading("\nAssumptions of only one"), *lines) if lines else Text("\nAssumptions: no difference.")


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


def _comparison_table(first: str, *more: str) -> Table:
    """Return a table with columns for A, B and their difference."""
    return table(f"~{first}", ">A", ">B", ">difference", *more, drop=("change A", "change B", "A", "B"))


def _three(unit: Unit, a: int | None, b: int | None, difference: int | None) -> list[str]:
    shown = ["-" if one is None else unit.amount(one) for one in (a, b)]
    return [*shown, "-" if difference is None else signed_bytes(difference)]


def _titled_table(title: str, what: str, made: Table, notes: Iterable[str] = ()) -> RenderableType:
    return Group(section(heading(f"\n{title}", f" ({what})"), made), *(dim(f"  {note}") for note in notes))
