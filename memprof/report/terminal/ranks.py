"""Terminal tables of the GPUs of one process, and of the ranks of a distributed run; equal ranks share a row."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from memprof.report.documents.ranks import GpuRow, RankRow
from memprof.report.terminal.cells import Unit
from memprof.report.terminal.console import dim, make_table
from memprof.report.terminal.stage_names import describe_stage
from memprof.units import format_ranges, gib

_LABEL_BY_ENDING = {
    "error": "failed", "not simulated": "stopped", "another rank": "stopped with others", "interrupted": "interrupted",
    "timeout": "timeout",
}  # fmt: skip


def render_gpus(gpus: tuple[GpuRow, ...], unit: Unit) -> RenderableType:
    """Return a table with the peaks and the verdict of each GPU."""
    table = make_table("gpus", ">capacity", ">allocated", ">needs", ">", ruled=True)
    for gpu in gpus:
        name = Text(gpu.device).append("  <- shown in full" * gpu.shown, style="bold")
        capacity = "" if gpu.total_bytes is None else f"{gib(gpu.total_bytes)} GiB"
        sizes = (gpu.peak_allocated_bytes, gpu.required_bytes)
        verdict = _render_fit(gpu.fits, "not known") if gpu.used else Text("not used")
        table.add_row(name, capacity, *map(unit.format, sizes), verdict)
    note = f"{unit.name}, at the most. The run fits if all GPUs do; --gpu-index shows another one in full."
    return Group(table, dim(note))


def render_ranks(ranks: tuple[RankRow, ...], unit: Unit, *, on_cpu: bool = False) -> RenderableType:
    """Return a table with the peaks and the verdict of each group of equal ranks; `on_cpu` omits what they need."""
    headers = () if on_cpu else (">needs",)
    table = make_table("ranks", ">allocated", "in", *headers, ">", ruled=True)
    groups: dict[int, list[RankRow]] = {}
    for row in ranks:
        groups.setdefault(row.rank if row.like is None else row.like, []).append(row)
    for rows in groups.values():
        first = rows[0]
        ranks_of_row = range(first.alike[0], first.alike[1] + 1) if first.alike else (row.rank for row in rows)
        name = Text(format_ranges(ranks_of_row))
        if shown_ranks := [row.rank for row in rows if row.shown]:
            prefix = f"{shown_ranks[0]} " if len(rows) > 1 or len(set(first.alike)) > 1 else ""
            name.append(f"  <- {prefix}shown in full", style="bold")
        sizes = [unit.format(first.required_bytes)] if headers else []
        verdict = _render_fit(first.fits, _LABEL_BY_ENDING.get(first.ended, "not known"))
        if first.fits is None:
            verdict.stylize("yellow")
        elif first.fits and on_cpu:
            verdict = Text()
        where = describe_stage(first.peak_stage, first.peak_step) if first.peak_stage else ""
        table.add_row(name, unit.format(first.peak_allocated_bytes), where, *sizes, verdict)
    equal_ranks = [f"{format_ranges(row.rank for row in rows)} are" for rows in groups.values() if len(rows) > 1]
    equal_note = f"Ranks {', '.join(equal_ranks)} equal to the byte. ".replace(" are,", ",") if equal_ranks else ""
    if ranks[0].alike:
        equal_note = "Ranks of one row do the same. "
    option_note = "; --rank shows another one in full" if len(groups) > 1 else ""
    fits = "" if on_cpu else f"The run fits if all ranks do{option_note}."
    note = f"{unit.name}, at the most. {equal_note}{fits}".rstrip()
    return Group(table, dim(note))


def _render_fit(fits: bool | None, unknown_text: str) -> Text:
    if fits is None:
        return Text(unknown_text)
    return Text("fits") if fits else Text("full", style="red")
