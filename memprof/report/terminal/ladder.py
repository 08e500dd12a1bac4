"""The ladder (runs, each with one more fix) as text for a terminal; below each run, what then limits its memory."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.fixes.catalog import ALL_FIXES
from memprof.report.documents.ladder import FixCost, LadderRow
from memprof.report.documents.report import Report
from memprof.report.terminal.cells import Unit, choose_unit, format_seconds
from memprof.report.terminal.console import AlignedLines, dim, make_section
from memprof.trace.facts import DeviceFacts
from memprof.units import GIB, format_bytes

_UNITS = ((10**12, "TFLOP"), (10**9, "GFLOP"), (10**6, "MFLOP"))
_NUMERICS_LABELS = {"exact": "exact", "approximate": "approx.", "different": "another"}
_CPU_SHARE = 0.1  # Share of the peak from which on the host memory traffic of a CPU optimizer is shown.
_BUS_SHARE = 0.01  # Share of a step's time below which the bus has no column beside a column of other GPUs.
_HEADERS = (">peak", ">reserved", ">saved", ">verdict", ">compute", ">bus", ">GPUs", ">step", ">numbers")
MIN_HOST_BYTES = 16 * GIB  # Host memory below this is not shown: any machine with such a GPU has it.


def render_ladder(document: Report, *, full: bool = True) -> RenderableType:
    """Return the ladder of a report as a table; with `full` also what then limits the memory of each row, the costs of
    its fixes and the fixes that were left out."""
    ladder = document.ladder
    unit = choose_unit(ladder[0].peak_allocated_bytes)
    fix_lines = [_format_fixes(row, ladder[i - 1] if i else None) for i, row in enumerate(ladder)]
    rows = [_format_row(row, unit, document.device, is_baseline=row is ladder[0]) for row in ladder]
    cells = [(names[0], *row) for names, row in zip(fix_lines, rows, strict=True)]
    name_width = max(len(name) for names in fix_lines for name in names)
    columns = list(zip((" " * name_width, *_HEADERS), *cells, strict=True))
    uses_links = any(row.cost.link_bytes for row in ladder)
    costs_of_rows = [row.cost for row in ladder]
    uses_bus = any((cost.extra_bus_seconds or 0.0) > _BUS_SHARE * (cost.step_seconds or 0.0) for cost in costs_of_rows)
    omitted = "GPUs" if not uses_links else "reserved" if uses_bus else "bus"  # there is not room for all on a line
    columns = [column for column in columns if column[0] != f">{omitted}"]
    cost_columns = [name for name in ("compute", "bus", "GPUs") if name != omitted]
    header, *rows = zip(*columns, strict=True)
    notes_below = []
    for names, row in zip(fix_lines, ladder, strict=True):
        host = f"; {format_bytes(row.host_peak_bytes)} in host memory" if row.host_peak_bytes > MIN_HOST_BYTES else ""
        if (row.cost.host_bytes or 0) > row.peak_allocated_bytes * _CPU_SHARE:
            host += f"; the CPU reads and writes {format_bytes(row.cost.host_bytes or 0)} in a step"
        bottleneck = [dim(f"    then: {row.next_bottleneck.text}{host}")] if full else []
        notes_below.append([*map(Text, names[1:]), *bottleneck])
    optional = [name for name in ("bus", "GPUs", "compute", "saved", "reserved") if f">{name}" in header]
    is_parallel = len({row.parallel for row in ladder}) > 1
    legend = (
        f"{unit.name}. saved: device memory, against the row above. {', '.join(cost_columns)}: more than the baseline. "
        f"{'GPUs: sent to other GPUs. ' * uses_links}step: the least time that it takes at this GPU's published rates, "
        "compute and transfers one after the other."
        f"{' Where GPUs share sequences, a step has as many as in the first row, one after another.' * is_parallel}"
    )
    view = AlignedLines(header, rows, notes_below, optional=optional)
    parts: list[RenderableType] = [make_section("The ladder: each row adds to those above", view, dim(legend), below=1)]
    if document.ladder_reason:
        parts.append(Text(f"Why these: {document.ladder_reason}.\n"))
    if not full:
        return Group(*parts)
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
    """Return the fixes that a row adds to the `previous` row, one per line; for the first row, "baseline"."""
    if previous is None:
        return [f"baseline ({row.parallel})" if row.parallel else "baseline"]
    new_fixes = [name for name in row.fixes if name not in previous.fixes]
    return ["+ " + new_fixes[0], *(f"  and {name}" for name in new_fixes[1:])]


def _format_row(row: LadderRow, unit: Unit, device: DeviceFacts, *, is_baseline: bool) -> tuple[str, ...]:
    miss = "pages" if device.would_page(row.device_used_bytes) else "OOM"
    verdict = "failed" if row.fits is None else "fits" if row.fits else miss
    saved = "" if is_baseline else unit.format(row.saved_bytes)
    sizes = unit.format(row.peak_allocated_bytes), unit.format(row.reserved_bytes), saved
    return (*sizes, verdict, *_format_cost(row.cost, is_baseline=is_baseline))


def _format_cost(cost: FixCost, *, is_baseline: bool) -> tuple[str, ...]:
    """Return table cells: operations, bytes over the bus and to other GPUs, seconds of a step, effect on numerics."""
    if cost.operations is None or cost.extra_operations is None or cost.step_seconds is None:
        return "?", "?", "?", "?", _NUMERICS_LABELS[cost.numerics]
    step = format_seconds(cost.step_seconds, 1)
    if is_baseline:
        amounts = (format_bytes(size or 0) for size in (cost.bus_bytes, cost.link_bytes))
        return _format_operations(cost.operations), *amounts, step, ""
    previous = cost.operations - cost.extra_operations
    share = cost.extra_operations / previous if previous else 0.0
    extra_bytes = (cost.extra_bus_bytes, cost.extra_link_bytes)
    transfers = (f"{'+' if size > 0 else ''}{format_bytes(size)}" if size else "-" for size in extra_bytes)
    return f"{share:+.1%}", *transfers, step, _NUMERICS_LABELS[cost.numerics]


def _format_operations(count: int) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if count >= 10 * unit), _UNITS[-1])
    return f"{count / unit:,.0f} {name}"
