"""The table of training steps: the most that each takes, and whether more stays behind from step to step."""

from __future__ import annotations

from itertools import groupby

from rich.console import Group, RenderableType

from memprof.ledger.steps import TrainingStep
from memprof.report.terminal.cells import Unit
from memprof.report.terminal.console import dim, table

MAX_ROWS = 12  # Of a run whose steps all differ: the first and the last of them.


def render_steps(steps: tuple[TrainingStep, ...], unit: Unit) -> RenderableType:
    """The table; steps that follow each other and grow by the same are one row, with the figures of the last."""
    made = table("steps", ">peak allocated", ">held at the end", ">growth", ruled=True)
    alike = [
        list(rows) for _, rows in groupby(steps, key=lambda row: (row.growth_bytes, row.peak_bytes - row.end_bytes))
    ]
    left_out = len(alike) - MAX_ROWS if len(alike) > MAX_ROWS + 1 else 0
    for number, rows in enumerate(alike):
        if left_out and MAX_ROWS // 2 <= number < MAX_ROWS // 2 + left_out:
            if number == MAX_ROWS // 2:
                made.add_row(dim(f"... {left_out} more"), "", "", "")
            continue
        first, last = rows[0], rows[-1]
        name = str(first.step) if first is last else f"{first.step}-{last.step}"
        growth = unit.amount(last.growth_bytes, sign=True)
        if last.growth_bytes and first is not last:
            growth += " each"
        made.add_row(name, unit.amount(last.peak_bytes), unit.amount(last.end_bytes), growth)
    note = f"{unit.name}. A step ends with its optimizer's step; growth: held beyond what the step before left."
    return Group(made, dim(note))
