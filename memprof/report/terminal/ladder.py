"""The ladder of fixes as text for a terminal: two lines per row, the second with the next bottleneck."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.fixes.catalog import ALL_FIXES
from memprof.report.documents.ladder import FixCost, LadderRow
from memprof.report.documents.report import Report
from memprof.report.terminal.cells import Unit, choose_unit, format_seconds
from memprof.report.terminal.console import AlignedLines, dim, make_section
from memprof.units import GIB, format_bytes

_UNITS = ((10**12, "TFLOP"), (10**9, "GFLOP"), (10**6, "MFLOP"))
_NUMERICS = {"exact": "exact", "approximate": "approx.", "different": "another"}
_CPU_SHARE = 0.1  # Share of the peak from which on the host memory traffic of a CPU optimizer is shown.
_BUS_SHARE = 0.01  # Share of a step's time below which the bus has no column beside a column of other GPUs.
_HEADERS = (">peak", ">reserved", ">saved", ">verdict", ">compute", ">bus", ">GPUs", ">step", ">numbers")
MIN_HOST_BYTES = 16 * GIB  # Host memory below this is not shown: any machine with such a GPU has it.


def render_ladder(document: Report) -> RenderableType:
    """Return the view of a report's ladder: rows, the reason for their choice, costs, and left-out fixes."""
    ladder = document.ladder
    unit = choose_unit(ladder[0].peak_allocated_bytes)
    added = [_format_fixes(row, ladder[number - 1] if number else None) for number, row in enumerate(ladder)]
    rows = [_format_row(row, unit, is_baseline=row is ladder[0]) for row in ladder]
    cells = [(names[0], *row) for names, row in zip(added, rows, strict=True)]
    first = max(len(name) for names in added for name in names)
    columns = list(zip((" " * first, *_HEADERS), *cells, strict=True))
    spread = any(row.cost.link_bytes for row in ladder)
    costs_of_rows = [row.cost for row in ladder]
    uses_bus = any((cost.extra_bus_seconds or 0.0) > _BUS_SHARE * (cost.step_seconds or 0.0) for cost in costs_of_rows)
    left_out = "gpus" if not spread else "reserved" if uses_bus else "bus"  # there is not room for all on a line
    columns = [column for column in columns if column[0] != f">{left_out}"]
    priced = [name for name in ("compute", "bus", "gpus") if name != left_out]
    header, *rows = zip(*columns, strict=True)
    below = []
    for names, row in zip(added, ladder, strict=True):
        host = f"; {format_bytes(row.host_peak_bytes)} in host memory" if row.host_peak_bytes > MIN_HOST_BYTES else ""
        if (row.cost.host_bytes or 0) > row.peak_allocated_bytes * _CPU_SHARE:
            host += f"; the CPU reads and writes {format_bytes(row.cost.host_bytes or 0)} in a step"
        below.append([*map(Text, names[1:]), dim(f"    then: {row.next_bottleneck.text}{host}")])
    least_needed = [name for name in ("bus", "gpus", "compute", "saved", "reserved") if f">{name}" in header]
    shared = len({row.parallel for row in ladder}) > 1
    legend = (
        f"{unit.name}. saved: device memory, against the row above. {', '.join(priced)}: more than the baseline. "
        f"{'GPUs: sent to other GPUs. ' * spread}step: the least time that it takes at this GPU's published rates, "
        "compute and transfers one after the other."
        f"{' Where GPUs share sequences, a step has as many as in the first row, one after another.' * shared}"
    )
    made = AlignedLines(header, rows, below, optional=least_needed)
    parts: list[RenderableType] = [make_section("The ladder: each row adds to those above", made, dim(legend), below=1)]
    if document.ladder_reason:
        parts.append(Text(f"Why these: {document.ladder_reason}.\n"))
    costs: dict[str, str] = {}
    for row in ladder:
        fixes = (fix.partition("=")[0] for fix in row.fixes)
        for fix in (ALL_FIXES[fix] for fix in fixes if fix in ALL_FIXES and fix not in costs):
            costs[fix.name] = f"{fix.cost}: {row.cost.compile_note}" if fix.compiles else fix.cost
    for title, notes, style in (("What they cost", costs, ""), ("Left out", document.ladder_left_out, "dim")):
        lines = (Text(f"{fix}: {note}", style=style) for fix, note in notes.items())
        parts += [make_section(title, *lines, below=1)] if notes else []
    return Group(*parts)


def _format_fixes(row: LadderRow, previous: LadderRow | None) -> list[str]:
    """Return the lines of a row's first cell: the fixes that the row adds to the previous one."""
    if previous is None:
        return [f"baseline ({row.parallel})" if row.parallel else "baseline"]
    added = [name for name in row.fixes if name not in previous.fixes]
    return ["+ " + added[0], *(f"  and {name}" for name in added[1:])]


def _format_row(row: LadderRow, unit: Unit, *, is_baseline: bool) -> tuple[str, ...]:
    verdict = "failed" if row.fits is None else "fits" if row.fits else "OOM"
    saved = "" if is_baseline else unit.format(row.saved_bytes)
    sizes = unit.format(row.peak_allocated_bytes), unit.format(row.reserved_bytes), saved
    return (*sizes, verdict, *_format_cost(row.cost, is_baseline=is_baseline))


def _format_cost(cost: FixCost, *, is_baseline: bool) -> tuple[str, ...]:
    """Return operations, bytes over the bus and to other GPUs, time of a step, and the effect on numerics."""
    if cost.operations is None or cost.extra_operations is None or cost.step_seconds is None:
        return "?", "?", "?", "?", _NUMERICS[cost.numerics]
    step = format_seconds(cost.step_seconds, 1)
    if is_baseline:
        amounts = (format_bytes(number or 0) for number in (cost.bus_bytes, cost.link_bytes))
        return _format_operations(cost.operations), *amounts, step, ""
    previous = cost.operations - cost.extra_operations
    share = cost.extra_operations / previous if previous else 0.0
    more = (cost.extra_bus_bytes, cost.extra_link_bytes)
    moved = (f"{'+' if size > 0 else ''}{format_bytes(size)}" if size else "-" for size in more)
    return f"{share:+.1%}", *moved, step, _NUMERICS[cost.numerics]


def _format_operations(count: int) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if count >= 10 * unit), _UNITS[-1])
    return f"{count / unit:,.0f} {name}"
