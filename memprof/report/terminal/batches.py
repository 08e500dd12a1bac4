"""Batches whose lengths vary: what is reserved over their steps, and what would keep it lower."""

from __future__ import annotations

from rich.console import RenderableType

from memprof.ledger.batches import Batches
from memprof.report.terminal.cells import Unit
from memprof.report.terminal.console import dim, section, table


def render_batches(batches: Batches, unit: Unit) -> RenderableType:
    """Reserved over the steps, by settings; and how much of it lies idle."""
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
