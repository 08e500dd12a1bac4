"""Published memory figures as a table: one row for one figure, in the form of published_memory.csv.

Columns: source, model, task, method, optimizer, weights, batch, seq, ckpt, attn, compile, loss, parallel, gpu, metric,
value, unit, scope, note. A row is compared in its own unit and metric.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "GB": 10**9, "MB": 10**6, "B": 1}
COLUMNS = (
    *("source", "model", "task", "method", "optimizer", "weights", "batch", "seq", "ckpt", "attn", "compile", "loss"),
    *("parallel", "gpu", "metric", "value", "unit", "scope", "note"),
)


class TableError(ValueError):
    """The file is no table of published figures; the text says what is wrong and where."""


@dataclass(frozen=True)
class Row:
    """One published figure. Texts are as they stand in the table."""

    line: int
    source: str
    model: str
    task: str
    method: str
    optimizer: str
    weights: str
    batch: str
    seq: str
    ckpt: str
    attn: str
    compile: str
    loss: str
    parallel: str
    gpu: str
    metric: str
    value: str
    unit: str
    scope: str
    note: str

    @property
    def figure(self) -> float:
        """The published number, in `unit`."""
        return float(self.value)

    @property
    def half_a_digit(self) -> float:
        """How far the figure may be off for having been rounded, in `unit`."""
        return 0.5 * 10.0 ** -len(self.value.partition(".")[2])

    @property
    def run(self) -> tuple[str, ...]:
        """What says which run the figure is of: every column but those of the figure."""
        figure = ("line", "metric", "value", "unit", "scope", "note")
        return tuple(text for name, text in vars(self).items() if name not in figure)

    @property
    def title(self) -> str:
        """What tells this row from its neighbours of the same source."""
        return " ".join(part for part in (self.model, self.method, self.weights, self.batch, self.seq) if part)


def read_rows(path: Path) -> list[Row]:
    """Every row of a table; TableError says which column is missing, or which figure or unit is none."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [
            name for name in ("source", "model", "metric", "value", "unit") if name not in (reader.fieldnames or ())
        ]
        if missing:
            raise TableError(f"{path}: no column {', '.join(missing)}; there are {', '.join(reader.fieldnames or ())}")
        rows = [
            Row(line, **{name: (cells.get(name) or "").strip() for name in COLUMNS})
            for line, cells in enumerate(reader, start=2)
        ]
    for row in rows:
        try:
            figure = float(row.value)
        except ValueError:
            figure = math.nan
        if not (math.isfinite(figure) and figure > 0):
            raise TableError(f"{path}, line {row.line}: {row.value!r} is no size")
        if row.unit.split()[0:1] not in [[unit] for unit in UNITS]:
            raise TableError(f"{path}, line {row.line}: {row.unit!r} is no unit; known are {', '.join(UNITS)}")
    return rows
