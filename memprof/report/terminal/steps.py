"""The table of training steps: the most that each takes, and whether more stays behind from step to step."""

from __future__ import annotations

from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memprof.ledger.steps import TrainingStep
from memprof.report.terminal.units import Unit

MAX_ROWS = 12
"""Of a run whose steps all differ: the first and the last of them."""


def render_steps(steps: tuple[TrainingStep, ...], unit: Unit) -> RenderableType:
    """The table; steps that follow each other and grow by the same are one row, with the figures of the last."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("steps")
    for header in ("peak allocated", "held at the end", "growth"):
        table.add_column(header, justify="right", no_wrap=True)
    alike = [
        list(rows) for _, rows in groupby(steps, key=lambda row: (row.growth_bytes, row.peak_bytes - row.end_bytes))
    ]
    left_out = len(alike) - MAX_ROWS if len(alike) > MAX_ROWS + 1 else 0
    for number, rows in enumerate(alike):
        if left_out and MAX_ROWS // 2 <= number < MAX_ROWS // 2 + left_out:
            if number == MAX_ROWS // 2:
                table.add_row(Text(f"... {left_out} more", style="dim"), "", "", "")
            continue
        first, last = rows[0], rows[-1]
        name = str(first.step) if first is last else f"{first.step}-{last.step}"
        growth = unit.amount(last.growth_bytes, sign=True)
        if last.growth_bytes and first is not last:
            growth += " each"
        table.add_row(name, unit.amount(last.peak_bytes), unit.amount(last.end_bytes), growth)
    note = f"{unit.name}. A step ends with its optimizer's step; growth: held beyond what the step before left."
    return Group(table, Text(note, style="dim"))
