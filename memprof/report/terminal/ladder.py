"""The ladder for a terminal: two lines per row, the second with the next bottleneck."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.fixes.catalog import STEPS
from memprof.report.documents.ladder import Cost, Rung
from memprof.report.documents.report import Report
from memprof.report.terminal.cells import Unit, unit_for
from memprof.report.terminal.console import Aligned, dim, section
from memprof.units import GIB, format_bytes

_UNITS = ((10**12, "TFLOP"), (10**9, "GFLOP"), (10**6, "MFLOP"))
_NUMBERS = {"exact": "exact", "approximate": "approx.", "different": "another"}
_CPU_WORK = 0.1  # An optimizer on the CPU is worth a word from this share of the peak on.
_BUS = 0.01  # Of a step's time: less over the bus needs no column where there is one of the GPUs.
_HEADERS = (">peak", ">reserved", ">saved", ">verdict", ">compute", ">bus", ">GPUs", ">step", ">numbers")
MIN_HOST_BYTES = 16 * GIB  # Host memory below this is there in every machine with such a GPU.


def render_ladder(document: Report) -> RenderableType:
    """Return the rows, the reason for their choice, and the fixes that were left out."""
    rungs = document.ladder
    unit = unit_for(rungs[0].peak_allocated_bytes)
    added = [_added(rung, rungs[number - 1] if number else None) for number, rung in enumerate(rungs)]
    cells = [(names[0], *_cells(rung, unit, first=rung is rungs[0])) for names, rung in zip(added, rungs, strict=True)]
    first = max(len(name) for names in added for name in names)
    columns = list(zip((" " * first, *_HEADERS), *cells, strict=True))
    spread = any(rung.cost.link_bytes for rung in rungs)
    uses_bus = any((rung.cost.extra_bus_seconds or 0.0) > _BUS * (rung.cost.step_seconds or 0.0) for rung in rungs)
    left_out = "gpus" if not spread else "reserved" if uses_bus else "bus"  # there is not room for all on a line
    columns = [column for column in columns if column[0] != f">{left_out}"]
    priced = [name for name in ("compute", "bus", "gpus") if name != left_out]
    header, *rows = zip(*columns, strict=True)
    below = []
    for names, rung in zip(added, rungs, strict=True):
        host = f"; {format_bytes(rung.host_peak_bytes)} in host memory" if rung.host_peak_bytes > MIN_HOST_BYTES else ""
        if (rung.cost.host_bytes or 0) > rung.peak_allocated_bytes * _CPU_WORK:
            host += f"; the CPU reads and writes {format_bytes(rung.cost.host_bytes or 0)} in a step"
        below.append([*map(Text, names[1:]), dim(f"    then: {rung.next_bottleneck.text}{host}")])
    least_needed = [name for name in ("bus", "gpus", "compute", "saved", "reserved") if f">{name}" in header]
    shared = len({rung.parallel for rung in rungs}) > 1
    legend = (
        f"{unit.name}. saved: device memory, against the row above. {', '.join(priced)}: more than the baseline. "
        f"{'GPUs: sent to other GPUs. ' * spread}step: the least time that it takes at this GPU's published rates, "
        "compute and transfers one after the other."
        f"{' Where GPUs share sequences, a step has as many as in the first row, one after another.' * shared}"
    )
    made = Aligned(header, rows, below, drop=least_needed)
    parts: list[RenderableType] = [section("The ladder: each row adds to those above", made, dim(legend), below=1)]
    if document.ladder_reason:
        parts.append(Text(f"Why these: {document.ladder_reason}.\n"))
    costs: dict[str, str] = {}
    for rung in rungs:
        fixes = (fix.partition("=")[0] for fix in rung.fixes)
        for fix in (STEPS[fix] for fix in fixes if fix in STEPS and fix not in costs):
            costs[fix.name] = f"{fix.cost}: {rung.cost.compiling}" if fix.compiles else fix.cost
    for title, notes, style in (("What they cost", costs, ""), ("Left out", document.ladder_left_out, "dim")):
        lines = (Text(f"{fix}: {note}", style=style) for fix, note in notes.items())
        parts += [section(title, *lines, below=1)] if notes else []
    return Group(*parts)


def _added(rung: Rung, before: Rung | None) -> list[str]:
    """Return the lines of a row's first cell; the other cells are those of all its fixes."""
    if before is None:
        return [f"baseline ({rung.parallel})" if rung.parallel else "baseline"]
    added = [name for name in rung.fixes if name not in before.fixes]
    return ["+ " + added[0], *(f"  and {name}" for name in added[1:])]


def _cells(rung: Rung, unit: Unit, *, first: bool) -> tuple[str, ...]:
    verdict = "failed" if rung.fits is None else "fits" if rung.fits else "OOM"
    saved = "" if first else unit.amount(rung.saved_bytes)
    sizes = unit.amount(rung.peak_allocated_bytes), unit.amount(rung.reserved_bytes), saved
    return (*sizes, verdict, *_cost(rung.cost, first=first))


def _cost(cost: Cost, *, first: bool) -> tuple[str, ...]:
    """Return operations, bytes over the bus and to other GPUs, time of a step, and the effect on numerics."""
    if cost.operations is None or cost.extra_operations is None or cost.step_seconds is None:
        return "?", "?", "?", "?", _NUMBERS[cost.numerics]
    step = _seconds(cost.step_seconds)
    if first:
        amounts = (format_bytes(number or 0) for number in (cost.bus_bytes, cost.link_bytes))
        return _operations(cost.operations), *amounts, step, ""
    before = cost.operations - cost.extra_operations
    share = cost.extra_operations / before if before else 0.0
    more = (cost.extra_bus_bytes, cost.extra_link_bytes)
    moved = (f"{'+' if size > 0 else ''}{format_bytes(size)}" if size else "-" for size in more)
    return f"{share:+.1%}", *moved, step, _NUMBERS[cost.numerics]


def _operations(count: int) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if count >= 10 * unit), _UNITS[-1])
    return f"{count / unit:,.0f} {name}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{1000 * seconds:,.1f} ms"
