"""Bytes of each category over the run, one line each, as wide as the console."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from memprof.ledger.over_time import OverTime
from memprof.report.terminal.cells import Unit, curve
from memprof.report.terminal.console import dim, heading, indented

MAX_LINES = 6
_LEAST_COLUMNS = 10


@dataclass(frozen=True)
class CategoryTimeline:
    """A line per category; `unit` is the unit of the figures after the lines, `peak_at` names the peak's stage."""

    found: OverTime
    unit: Unit
    peak_at: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = self.found
        names = list(found.categories)[:MAX_LINES]
        highest = max(found.most_bytes.values(), default=1)
        label, figures = max(map(len, (*names, "step"))), len(self.unit.amount(highest))
        columns = options.max_width - 2 - label - 2 - 2 - figures
        if columns < _LEAST_COLUMNS:
            return
        columns = min(columns, found.num_events)
        shown = self._shown_moments(columns)
        lines = [
            Text(
                f"{name:<{label}}  {curve((found.categories[name][at] for at in shown), highest)}  "
                f"{self.unit.amount(found.most_bytes[name]):>{figures}}"
            )
            for name in names
        ]
        marks = [" "] * columns
        marks[shown.index(found.events.index(found.peak_event))] = "^"
        legend = f"^ the peak, in {self.peak_at}"
        if found.failed_event is not None:
            place = min(found.failed_event * columns // found.num_events, columns - 1)
            both = marks[place] == "^"
            marks[place] = "‼" if both else "!"
            legend = f"‼ {legend[2:]}, and the" if both else f"{legend}; ! the"
            legend += " request that the GPU refuses"
        lines.append(dim(f"{'':<{label}}  {''.join(marks).rstrip()}"))
        if steps := self._steps(columns):
            lines.append(dim(f"{'step':<{label}}  {steps}"))
        yield heading("Over the run, ", f"{self.unit.name}, event by event; behind each line the most that it reaches")
        yield indented(*lines, dim(legend), below=1)

    def _shown_moments(self, columns: int) -> list[int]:
        """Return the index of the moment for each column: of several moments in a column, the highest."""
        found, moments = self.found, len(self.found.events)
        if columns >= moments:
            return [column * moments // columns for column in range(columns)]
        peak = found.events.index(found.peak_event)
        shown = []
        for column in range(columns):
            within = range(moments * column // columns, moments * (column + 1) // columns)
            shown.append(peak if peak in within else max(within, key=found.allocated_bytes.__getitem__))
        return shown

    def _steps(self, columns: int) -> str:
        """Return the step numbers below the steps' begins, as many as there is room for."""
        line = ""
        for step, begin in self.found.steps:
            place = min(begin * columns // self.found.num_events, columns - 1)
            if place >= len(line) + bool(line) and place + len(str(step)) <= columns:
                line = f"{line:<{place}}{step}"
        return line
