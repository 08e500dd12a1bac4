"""Terminal tables of the GPUs of one process, and of the ranks of a distributed run; equal ranks share a row."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.ledger.stages import at_stage
from memprof.report.documents.ranks import GpuRow, RankRow
from memprof.report.terminal.cells import Unit
from memprof.report.terminal.console import dim, make_table
from memprof.units import format_ranges, gib

_LABEL_BY_ENDING = {
    "error": "failed", "not simulated": "stopped", "another rank": "stopped with others", "interrupted": "interrupted",
    "timeout": "timeout",
}  # fmt: skip


def render_gpus(gpus: tuple[GpuRow, ...], unit: Unit) -> RenderableType:
    """Return a table with the peaks and the verdict of each GPU."""
    made = make_table("gpus", ">capacity", ">allocated", ">reserved", ">device used", ">", ruled=True)
    for gpu in gpus:
        name = Text(gpu.device).append("  <- below" * gpu.shown, style="bold")
        capacity = "" if gpu.total_bytes is None else f"{gib(gpu.total_bytes)} GiB"
        figures = (gpu.peak_allocated_bytes, gpu.peak_reserved_bytes, gpu.device_used_bytes)
        verdict = _render_fit(gpu.fits, "not known") if gpu.used else Text("not used")
        made.add_row(name, capacity, *map(unit.format, figures), verdict)
    note = f"{unit.name}, at the most. The run fits if all GPUs do; --gpu-index shows another one in full."
    return Group(made, dim(note))


def render_ranks(ranks: tuple[RankRow, ...], unit: Unit, *, on_cpu: bool = False) -> RenderableType:
    """Return a table with peaks and verdict of each group of equal ranks; on a CPU without reserved memory."""
    of_gpu = () if on_cpu else (">reserved", ">device used")
    made = make_table("ranks", ">allocated", "in", *of_gpu, ">", ruled=True)
    kinds: dict[int, list[RankRow]] = {}
    for row in ranks:
        kinds.setdefault(row.rank if row.like is None else row.like, []).append(row)
    for rows in kinds.values():
        first = rows[0]
        stands_for = range(first.alike[0], first.alike[1] + 1) if first.alike else (row.rank for row in rows)
        name = Text(format_ranges(stands_for))
        if shown := [row.rank for row in rows if row.shown]:
            which = f"{shown[0]} " if len(rows) > 1 or len(set(first.alike)) > 1 else ""
            name.append(f"  <- {which}below", style="bold")
        figures = [unit.format(one) for one in (first.peak_reserved_bytes, first.device_used_bytes)] if of_gpu else []
        verdict = _render_fit(first.fits, _LABEL_BY_ENDING.get(first.ended, "not known"))
        if first.fits is None:
            verdict.stylize("yellow")
        elif first.fits and on_cpu:
            verdict = Text()
        where = at_stage(first.peak_stage, first.peak_step) if first.peak_stage else ""
        made.add_row(name, unit.format(first.peak_allocated_bytes), where, *figures, verdict)
    alike = [f"{format_ranges(row.rank for row in rows)} are" for rows in kinds.values() if len(rows) > 1]
    said = f"Ranks {', '.join(alike)} equal to the byte. ".replace(" are,", ",") if alike else ""
    if ranks[0].alike:
        said = "Ranks of one row do the same. "
    more = "; --rank shows another one in full" if len(kinds) > 1 else ""
    fits = "" if on_cpu else f"The run fits if all ranks do{more}."
    note = f"{unit.name}, at the most. {said}{fits}".rstrip()
    return Group(made, dim(note))


def _render_fit(fits: bool | None, unknown: str) -> Text:
    if fits is None:
        return Text(unknown)
    return Text("fits") if fits else Text("full", style="red")
