"""The whole result of `memprof compare` as text for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memprof.report.documents.comparison import (
    ONLY_IN_A,
    ONLY_IN_B,
    SAME,
    Comparison,
    KernelMemory,
    RunDescription,
    StageBytes,
    StageRow,
    TensorGroup,
    TensorRow,
)
from memprof.report.terminal.cells import (
    Unit,
    choose_unit,
    describe_total,
    format_signed_bytes,
    format_tensors,
    join_first,
)
from memprof.report.terminal.console import dim, make_heading, make_section, make_table
from memprof.report.terminal.next_step import choose_step_after_compare, render_next_step
from memprof.report.terminal.stage_names import describe_stage
from memprof.units import format_bytes

T = TypeVar("T", int, float)
MAX_NAMES = 6  # Named stages that only one run has; named kernels of a run.


def render(
    document: Comparison, *, top: int = 10, explain: bool = False, quiet: bool = False, files: tuple[Path, ...] = ()
) -> RenderableType:
    """Return the result of a comparison as text, `top` rows per table; `explain` adds assumptions of only one run.

    `quiet` leaves only the verdict; `files` (A and B) add the command to try next.
    """
    if quiet:
        return render_verdict(document)
    unit = choose_comparison_unit(document)
    parts = [render_heading(document), render_settings(document), _render_totals(document, unit)]
    parts += [render_stages(document, unit, top), _render_categories(document, unit, top)]
    parts += [render_tensors(document, top), _render_kernels(document), _render_reserved(document, unit)]
    parts += [_render_findings(document), *([_render_assumptions(document)] if explain else [])]
    return Group(
        *parts, Text(""), render_verdict(document), *render_next_step(choose_step_after_compare(document, files))
    )


def choose_comparison_unit(document: Comparison) -> Unit:
    """Return the unit in which the totals of both runs are shown."""
    return choose_unit(max((max(row.a_bytes or 0, row.b_bytes or 0) for row in document.totals), default=0))


def render_heading(document: Comparison) -> RenderableType:
    """Return the heading of a comparison: both files, and whether each run is simulated or measured."""
    lines = [make_heading("memprof compare")]
    for letter, side in (("A", document.a), ("B", document.b)):
        lines.append(Text(f"{letter}: {side.file}, {_describe_side(side)}"))
        lines += [dim(f"   {note}") for note in side.notes]
    if document.has_different_peaks:
        moments = f"A's is in {document.a.peak_at}, B's in {document.b.peak_at}"
        lines.append(Text(f"The peaks are different moments: {moments}.", style="yellow"))
    return Group(*lines)


def _describe_side(side: RunDescription) -> str:
    kind = "simulated on a virtual" if side.source == "simulated" else "measured on"
    recording = "an export of a simulated run" if side.source == "simulated" else "a recording of torch"
    text = f"{kind} {side.device}" if side.device else recording
    if side.failure is not None:
        return f"{text}; it failed: {side.failure}"
    if side.fits is None:
        return text
    return f"{text}, {'fits, but pages' if side.pages else 'fits' if side.fits else 'does not fit'}"


def render_settings(document: Comparison) -> RenderableType:
    """Return a table of the settings that differ."""
    same = f"{document.same_settings} are the same" if document.same_settings else "none is the same"
    if not document.settings:
        return Text(f"\nSettings: no difference ({same}).")
    new_table = make_table("~setting", "~A", "~B")
    for row in document.settings:
        new_table.add_row(Text(row.name), Text(_format_setting(row.a)), Text(_format_setting(row.b)))
    return _make_section("Settings that differ", same, new_table)


def _format_setting(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) or "-" if isinstance(value, list | tuple) else str(value)


def _render_totals(document: Comparison, unit: Unit) -> RenderableType:
    new_table = _make_table(unit.name, "~")
    for row in document.totals:
        if row.a_bytes is None and row.b_bytes is None:
            continue
        verdict = Text(describe_total(row), style="dim" if not row.compared else "green" if row.within else "red")
        new_table.add_row(row.name, *_format_sides(unit, row.a_bytes, row.b_bytes, row.difference_bytes), verdict)
    return _make_section("Totals", f"tolerance {document.tolerance}", new_table)


def render_stages(document: Comparison, unit: Unit, top: int) -> RenderableType:
    """Return a table of the stages that differ, layers of one stack as one row, the largest difference first."""
    groups = _group_by_stack(row for row in document.stages if row.a and row.b and row.status != SAME)
    groups.sort(key=lambda rows: -max(abs(row.difference_bytes or 0) for row in rows))
    only_in_one = {kind: [row for row in document.stages if row.status == kind] for kind in (ONLY_IN_A, ONLY_IN_B)}
    same = sum(row.status == SAME for row in document.stages)
    names = {kind: list(map(_format_stage_name, _group_by_stack(rows))) for kind, rows in only_in_one.items() if rows}
    notes = [f"{kind}: {join_first(stages, MAX_NAMES)}" for kind, stages in names.items()]
    if groups[top:]:
        notes.append(f"{len(groups[top:])} more that differ (--top)")
    if not groups[:top]:
        text = Text(f"\nStages: the {same} that both have are the same." if same else "\nStages: none in common.")
        return Group(text, *(dim(f"  {note}") for note in notes))
    timed = document.seconds_a is not None or document.seconds_b is not None
    new_table = _make_table(f"peak, {unit.name}", ">change A", ">change B", *([">seconds A", ">B"] if timed else []))
    for group in groups[:top]:
        a, b = ([row.a for row in group], [row.b for row in group])
        peak_a, peak_b = (max(_list_values(side, lambda stage: stage.peak_allocated_bytes)) for side in (a, b))
        changes = [sum(_list_values(side, lambda stage: stage.delta_bytes)) for side in (a, b)]
        seconds = [_list_values(side, lambda stage: stage.seconds) for side in (a, b)] if timed else []
        new_table.add_row(
            _format_stage_name(group),
            *_format_sides(unit, peak_a, peak_b, peak_b - peak_a),
            *(unit.format(size, sign=True) for size in changes),
            *(f"{sum(values):.3f}" if values else "-" for values in seconds),
        )
    return _make_section("Stages", f"largest differences first; {same} are the same", new_table, notes)


def _list_values(side: Iterable[StageBytes | None], value: Callable[[StageBytes], T | None]) -> list[T]:
    return [result for stage in side if stage is not None and (result := value(stage)) is not None]


def _group_by_stack(rows: Iterable[StageRow]) -> list[list[StageRow]]:
    """Return stage rows in the order of the run: the layers of a stack in one group, any other stage in its own."""
    sorted_rows = sorted(rows, key=lambda row: row.order)
    stacks = groupby(sorted_rows, key=lambda row: (row.step, row.micro_batch, row.stack or row.order))
    return [list(group) for _, group in stacks]


def _format_stage_name(rows: list[StageRow]) -> str:
    first = rows[0]
    layer_range = f"{first.name.rpartition(' ')[0]}s {first.index}-{rows[-1].index}"
    name = layer_range if len(rows) > 1 else first.name
    return describe_stage(name, first.step, first.micro_batch)


def _render_categories(document: Comparison, unit: Unit, top: int) -> RenderableType:
    differing_rows = [row for row in document.categories if row.difference_bytes]
    if not differing_rows:
        return Text("\nCategories at the peak: no difference.")
    new_table = _make_table(unit.name)
    for row in document.categories[:top]:
        new_table.add_row(row.category, *_format_sides(unit, row.a_bytes, row.b_bytes, row.difference_bytes))
    return _make_section("Categories", "at each one's own peak, without kernels' own memory", new_table)


def render_tensors(document: Comparison, top: int) -> RenderableType:
    """Return a table of the tensors at the peak that differ, the largest difference first."""
    same = f"{document.same_tensors} rows, {format_bytes(document.same_tensors_bytes)}, are the same"
    if not document.tensors:
        return Text(f"\nTensors at the peak: no difference ({same}).")
    new_table = make_table(">difference", "~what", "~A", "~B", optional=("A", "B"))
    differing_rows = [row for row in document.tensors if row.difference_bytes]
    for row in differing_rows[:top]:
        sides = (_format_side(row, side) for side in (row.a, row.b))
        new_table.add_row(format_signed_bytes(row.difference_bytes), _format_owner(row), *sides)
    notes = [f"{len(differing_rows) - top} more (--top; --json has all)"] if len(differing_rows) > top else []
    if num_equal_size := len(document.tensors) - len(differing_rows):
        notes.append(f"{num_equal_size} more with the same bytes, but another operator or shape (--json)")
    if not differing_rows:
        return Text(f"\nTensors at the peak: no difference in bytes ({same}; {notes[-1]}).")
    return _make_section("Tensors at the peak", f"matched by {document.tensors_matched_by}; {same}", new_table, notes)


def _format_owner(row: TensorRow) -> Text:
    text = Text(row.category)
    if row.where:
        text.append(f" {row.where}")
    tensors = row.a or row.b
    if row.status != "operator" and tensors is not None:
        text.append(f" {tensors.op.removeprefix('aten.')}", style="dim")
    return text


def _format_side(row: TensorRow, side: TensorGroup | None) -> Text:
    if side is None:
        return dim("-")
    text = Text(format_tensors(side))
    if row.status == "operator":
        text.append(f" {side.op}", style="dim")
    return text


def _render_kernels(document: Comparison) -> RenderableType:
    lines = [
        Text(f"  {letter}: {memory.kind}, {format_bytes(memory.num_bytes)}: {_format_kernels(memory)}")
        for letter, memory in (("A", document.kernels_a), ("B", document.kernels_b))
        if memory.num_bytes
    ]
    if not lines:
        return Text("\nKernels' own memory at the peak: none.")
    return Group(make_heading("\nKernels' own memory at the peak", " (in no category and no tensor above)"), *lines)


def _format_kernels(memory: KernelMemory) -> str:
    sums = Counter[str]()
    for tensor in memory.tensors:
        sums[tensor.op] += tensor.total_bytes
    return join_first([f"{op} {format_bytes(num_bytes)}" for op, num_bytes in sums.most_common()], MAX_NAMES)


def _render_reserved(document: Comparison, unit: Unit) -> RenderableType:
    if not any(row.difference_bytes for row in document.reserved):
        is_known = any(row.difference_bytes is not None for row in document.reserved)
        text = "no difference" if is_known else "only one has any" if document.reserved else "not known"
        return Text(f"\nReserved memory and fragmentation: {text}.")
    new_table = _make_table(unit.name)
    for row in document.reserved:
        if row.a_bytes or row.b_bytes:
            new_table.add_row(row.name, *_format_sides(unit, row.a_bytes, row.b_bytes, row.difference_bytes))
    return _make_section("Reserved memory and fragmentation", "where most is reserved", new_table)


def _render_findings(document: Comparison) -> RenderableType:
    if not document.findings:
        return Text("\nFindings: no difference." if document.findings is not None else "\nFindings: only one has any.")
    lines = []
    for row in document.findings:
        if row.in_a and row.in_b:
            amounts = ["no bytes" if size is None else format_bytes(size) for size in (row.a_bytes, row.b_bytes)]
            change = f"{amounts[0]} -> {amounts[1]}"
        else:
            num_bytes = row.a_bytes if row.in_a else row.b_bytes
            size_text = "" if num_bytes is None else f", {format_bytes(num_bytes)}"
            change = f"only in {'A' if row.in_a else 'B'}{size_text}"
        lines.append(Text(f"  {row.id}: {change}"))
    return Group(make_heading("\nFindings that differ"), *lines)


def _render_assumptions(document: Comparison) -> RenderableType:
    sides = (("A", document.assumptions_only_in_a), ("B", document.assumptions_only_in_b))
    lines = [Text(f"  - {letter}: {sentence}") for letter, assumptions in sides for sentence in assumptions]
    return Group(make_heading("\nAssumptions of only one"), *lines) if lines else Text("\nAssumptions: no difference.")


def render_verdict(document: Comparison) -> Text:
    """Return which totals differ by more than the tolerance."""
    compared = [row for row in document.totals if row.compared]
    outside = [row.name for row in compared if not row.within]
    if outside:
        by = f" by more than {document.tolerance}" if document.tolerance != "0" else ""
        return Text(f"{len(outside)} of {len(compared)} totals differ{by}: {', '.join(outside)}.", style="bold red")
    if not compared:
        return Text("No total is known of both.", style="bold yellow")
    are_equal = all(row.difference_bytes == 0 for row in compared)
    result = "are equal, to the byte" if are_equal else f"are within {document.tolerance}"
    return Text(f"All {len(compared)} totals that are compared {result}.", style="bold green")


def _make_table(first: str, *more: str) -> Table:
    """Return an empty table with columns for the amounts of runs A and B and for their difference."""
    return make_table(f"~{first}", ">A", ">B", ">difference", *more, optional=("change A", "change B", "A", "B"))


def _format_sides(unit: Unit, a: int | None, b: int | None, difference: int | None) -> list[str]:
    cells = ["-" if size is None else unit.format(size) for size in (a, b)]
    return [*cells, "-" if difference is None else format_signed_bytes(difference)]


def _make_section(title: str, subtitle: str, new_table: Table, notes: Iterable[str] = ()) -> RenderableType:
    return Group(
        make_section(make_heading(f"\n{title}", f" ({subtitle})"), new_table), *(dim(f"  {note}") for note in notes)
    )
