"""The result of `memprof sweep`, with the names of its JSON; sizes are bytes, times are seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memprof.report.documents.base import DisplayedDocument
from memprof.report.frames import RowTable
from memprof.trace.json_values import JsonValue
from memprof.version import __version__

SCHEMA = 1
SIZE_AXES = ("context_length", "batch_size")  # Axes along which more tokens never need less memory.
AxisValue = str | int | None


@dataclass(frozen=True, slots=True)
class CellAnswer(JsonValue):
    """The answer to one cell of a sweep: whether it fits, and with which memory, time and fixes."""

    # run: simulated; estimate: the analytical estimate leaves no doubt; monotony: a run with more tokens fits, or one
    # with fewer does not; failed: `reason` has the error; left: the sweep ended before.
    how: str
    fits: bool | None  # None: no verdict. A run that pages does not fit.
    needed_bytes: int | None = None  # Device memory, CUDA context included.
    bound: str = ""  # What `needed_bytes` is: exact ("", of a run), about, at most or at least.
    headroom_bytes: int | None = None  # Capacity minus `needed_bytes`; may be negative.
    step_seconds: float | None = None  # Minimum time of a step; None: not run.
    # The fixes with which the figures are: those requested, or found by auto. By monotony: fixes that suffice.
    fixes: tuple[str, ...] = ()
    reason: str = ""  # Where memory runs out, the largest part of the peak, the run that decides, or the error.
    run_seconds: float | None = None  # Time that answering took.
    cached: bool = False  # Answered by an earlier sweep.
    pages: bool = False  # Whether no allocation fails, and some of the memory that GPU and host share pages.


@dataclass(frozen=True, slots=True)
class SweepAxis:
    """One axis of a sweep: an option, or a placeholder of the script, and its values in order."""

    name: str
    values: tuple[str, ...]
    is_size: bool  # Whether the values are numbers of which more never needs less, or is taken to be more.


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One cell: its value of each axis in the order of the axes, its answer, and its command."""

    values: tuple[str, ...]
    answer: CellAnswer
    command: str  # The command of the cell alone.
    on_frontier: bool = False  # It fits, and no cell that is larger along the size axes, and equal otherwise, does.

    @property
    def has_failed(self) -> bool:
        """Return whether the cell failed, or ran without a verdict."""
        return self.answer.fits is None and self.answer.how != "left"


@dataclass(frozen=True, slots=True)
class Sweep(DisplayedDocument):
    """The result of `memprof sweep`: a row for each cell of the grid, in the order of the axes."""

    axes: tuple[SweepAxis, ...]
    rows: tuple[SweepRow, ...]
    ended: str = "complete"  # complete, interrupted, or stopped: the executor failed.
    note: str = ""  # Why it stopped, and how many answers could not be stored.
    seconds: float = 0.0  # Of the whole sweep.
    store: str | None = None  # Where answers are stored.
    assumptions: tuple[str, ...] = ()
    schema: int = SCHEMA
    memprof_version: str = __version__
    command: str = "sweep"

    def count(self, how: str) -> int:
        """Return the number of cells that were answered in this way."""
        return sum(row.answer.how == how for row in self.rows)

    @property
    def num_failed(self) -> int:
        """Return the number of cells that failed, or ran without a verdict."""
        return sum(row.has_failed for row in self.rows)

    @property
    def num_fitting(self) -> int:
        """Return the number of cells that fit."""
        return sum(row.answer.fits is True for row in self.rows)

    def tables(self) -> dict[str, RowTable]:
        """Return the tables by name: `cells`, and `frontier`, the largest cells that fit."""
        columns = {axis.name: int if axis.is_size else str for axis in self.axes}
        kinds = list(columns.values())

        def build_table(rows: tuple[SweepRow, ...]) -> RowTable:
            cells = [(*_convert(row.values, kinds), row.command, row.answer) for row in rows]
            return RowTable(cells, CellAnswer, {**columns, "command": str})

        return {
            "cells": build_table(self.rows),
            "frontier": build_table(tuple(row for row in self.rows if row.on_frontier)),
        }


def _convert(values: tuple[str, ...], kinds: Sequence[type]) -> list[str | int]:
    return [int(value) if kind is int else value for value, kind in zip(values, kinds, strict=True)]
