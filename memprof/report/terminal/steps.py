"""Terminal tables of a run's steps: allocated bytes of each step, and reserved bytes over batches that differ."""

from __future__ import annotations

from itertools import groupby

from rich.console import Group, RenderableType

from memprof.ledger.batches import Batches
from memprof.ledger.steps import TrainingStep
from memprof.report.terminal.cells import Unit
from memprof.report.terminal.console import dim, make_section, make_table

MAX_ROWS = 12  # Rows of the table, half for the first steps and half for the last.


def render_steps(steps: tuple[TrainingStep, ...], unit: Unit) -> RenderableType:
    """Return a table of steps; successive steps with equal growth share a row with the values of the last of them."""
    table = make_table("steps", ">peak allocated", ">held at the end", ">growth", ruled=True)
    step_groups = groupby(steps, key=lambda row: (row.growth_bytes, row.peak_bytes - row.end_bytes))
    groups = [list(rows) for _, rows in step_groups]
    half, num_omitted = MAX_ROWS // 2, len(groups) - MAX_ROWS if len(groups) > MAX_ROWS + 1 else 0
    for i, rows in enumerate(groups[:half] + groups[half + num_omitted :]):
        if num_omitted and i == half:
            table.add_row(dim(f"... {num_omitted} more"), "", "", "")
        first, last = rows[0], rows[-1]
        name = str(first.step) if first is last else f"{first.step}-{last.step}"
        growth = unit.format(last.growth_bytes, sign=True)
        if last.growth_bytes and first is not last:
            growth += " each"
        table.add_row(name, unit.format(last.peak_bytes), unit.format(last.end_bytes), growth)
    note = f"{unit.name}. A step ends with its optimizer's step; growth: held beyond what the step before left."
    return Group(table, dim(note))


def render_batches(batches: Batches, unit: Unit) -> RenderableType:
    """Return a table of reserved bytes over the steps (mean, 99th percentile, peak) for each allocator setting."""
    table = make_table(f"reserved in a step, {unit.name}", ">mean", ">p99", ">peak", ">peak in step")
    for row in batches.reserved:
        amounts = (unit.format(size) for size in (row.mean_bytes, row.p99_bytes, row.peak_bytes))
        table.add_row(row.how, *amounts, str(row.settled_step))
    longest = max(batches.steps, key=lambda step: step.peak_allocated_bytes)
    first, last = batches.steps[0], batches.steps[-1]
    length_note, batch_note, title = "", "", " of the program, whose batches differ"
    if batches.lengths is not None:
        length_note, title = f" (of {longest.sequence_length:,} tokens)", f" with lengths {batches.lengths}"
        batch_note = f"Batches of {batches.mean_length:,.0f} tokens on average, {batches.longest:,} at most. "
    note = (
        f"{batch_note}Tensors take up to {unit.format(longest.peak_allocated_bytes)}, in step {longest.step}"
        f"{length_note}. Reserved beyond what they ever took: {unit.format(first.unused_bytes)} after the first step, "
        f"{unit.format(last.unused_bytes)} after the last."
    )
    return make_section(f"\nOver {len(batches.steps)} steps{title}", table, dim(note))
