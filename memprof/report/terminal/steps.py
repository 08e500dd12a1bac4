"""Terminal tables of a run's steps: allocated bytes at the end of each, and reserved bytes over varying batches."""

from __future__ import annotations

from itertools import groupby

from rich.console import Group, RenderableType

from memprof.ledger.batches import Batches
from memprof.ledger.steps import TrainingStep
from memprof.report.terminal.cells import Unit
from memprof.report.terminal.console import dim, make_section, make_table

MAX_ROWS = 12  # Rows of the table, half for the first steps and half for the last.


def render_steps(steps: tuple[TrainingStep, ...], unit: Unit) -> RenderableType:
    """Return a table of steps; successive steps with the same growth share a row, with the values of the last."""
    made = make_table("steps", ">peak allocated", ">held at the end", ">growth", ruled=True)
    groups = groupby(steps, key=lambda row: (row.growth_bytes, row.peak_bytes - row.end_bytes))
    alike = [list(rows) for _, rows in groups]
    half, left_out = MAX_ROWS // 2, len(alike) - MAX_ROWS if len(alike) > MAX_ROWS + 1 else 0
    for number, rows in enumerate(alike[:half] + alike[half + left_out :]):
        if left_out and number == half:
            made.add_row(dim(f"... {left_out} more"), "", "", "")
        first, last = rows[0], rows[-1]
        name = str(first.step) if first is last else f"{first.step}-{last.step}"
        growth = unit.format(last.growth_bytes, sign=True)
        if last.growth_bytes and first is not last:
            growth += " each"
        made.add_row(name, unit.format(last.peak_bytes), unit.format(last.end_bytes), growth)
    note = f"{unit.name}. A step ends with its optimizer's step; growth: held beyond what the step before left."
    return Group(made, dim(note))


def render_batches(batches: Batches, unit: Unit) -> RenderableType:
    """Return a table of reserved bytes over the steps (mean, 99th percentile, peak) for each allocator setting."""
    made = make_table(f"reserved in a step, {unit.name}", ">mean", ">p99", ">peak", ">peak in step")
    for row in batches.reserved:
        amounts = (unit.format(size) for size in (row.mean_bytes, row.p99_bytes, row.peak_bytes))
        made.add_row(row.how, *amounts, str(row.settled_step))
    longest = max(batches.steps, key=lambda step: step.peak_allocated_bytes)
    first, last = batches.steps[0], batches.steps[-1]
    of, fed, title = "", "", " of the program, whose batches differ"
    if batches.lengths is not None:
        of, title = f" (of {longest.sequence_length:,} tokens)", f" with lengths {batches.lengths}"
        fed = f"Batches of {batches.mean_length:,.0f} tokens on average, {batches.longest:,} at most. "
    note = (
        f"{fed}Tensors take up to {unit.format(longest.peak_allocated_bytes)}, in step {longest.step}{of}. Reserved "
        f"beyond what they ever took: {unit.format(first.unused_bytes)} after the first step, "
        f"{unit.format(last.unused_bytes)} after the last."
    )
    return make_section(f"\nOver {len(batches.steps)} steps{title}", made, dim(note))
