"""Bytes allocated at the end of each step of a run, and reserved bytes over batches whose lengths vary."""

from __future__ import annotations

from itertools import groupby

from rich.console import Group, RenderableType

from memprof.ledger.batches import Batches
from memprof.ledger.steps import TrainingStep
from memprof.report.terminal.cells import Unit
from memprof.report.terminal.console import dim, section, table

MAX_ROWS = 12  # Of a run whose steps all differ: the first and the last of them.


def render_steps(steps: tuple[TrainingStep, ...], unit: Unit) -> RenderableType:
    """Return a table of steps; successive steps with the same growth are one row, with the figures of the last."""
    made = table("steps", ">peak allocated", ">held at the end", ">growth", ruled=True)
    groups = groupby(steps, key=lambda row: (row.growth_bytes, row.peak_bytes - row.end_bytes))
    alike = [list(rows) for _, rows in groups]
    half, left_out = MAX_ROWS // 2, len(alike) - MAX_ROWS if len(alike) > MAX_ROWS + 1 else 0
    for number, rows in enumerate(alike[:half] + alike[half + left_out :]):
        if left_out and number == half:
            made.add_row(dim(f"... {left_out} more"), "", "", "")
        first, last = rows[0], rows[-1]
        name = str(first.step) if first is last else f"{first.step}-{last.step}"
        growth = unit.amount(last.growth_bytes, sign=True)
        if last.growth_bytes and first is not last:
            growth += " each"
        made.add_row(name, unit.amount(last.peak_bytes), unit.amount(last.end_bytes), growth)
    note = f"{unit.name}. A step ends with its optimizer's step; growth: held beyond what the step before left."
    return Group(made, dim(note))


def render_batches(batches: Batches, unit: Unit) -> RenderableType:
    """Return reserved memory over the steps, by settings, and its unused part."""
    made = table(f"reserved in a step, {unit.name}", ">mean", ">p99", ">peak", ">peak in step")
    for row in batches.reserved:
        amounts = (unit.amount(size) for size in (row.mean_bytes, row.p99_bytes, row.peak_bytes))
        made.add_row(row.how, *amounts, str(row.settled_step))
    longest = max(batches.steps, key=lambda step: step.peak_allocated_bytes)
    first, last = batches.steps[0], batches.steps[-1]
    of, fed, title = "", "", " of the program, whose batches differ"
    if batches.lengths is not None:
        of, title = f" (of {longest.sequence_length:,} tokens)", f" with lengths {batches.lengths}"
        fed = f"Batches of {batches.mean_length:,.0f} tokens on average, {batches.longest:,} at most. "
    note = (
        f"{fed}Tensors take up to {unit.amount(longest.peak_allocated_bytes)}, in step {longest.step}{of}. Reserved "
        f"beyond what they ever took: {unit.amount(first.unused_bytes)} after the first step, "
        f"{unit.amount(last.unused_bytes)} after the last."
    )
    return section(f"\nOver {len(batches.steps)} steps{title}", made, dim(note))
