"""Curves of the bytes of each category over a run, as wide as the console."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from memprof.ledger.over_time import OverTime
from memprof.report.terminal.cells import Unit, draw_curve
from memprof.report.terminal.console import dim, indent, make_heading

MAX_LINES = 6
_MIN_COLUMNS = 10


@dataclass(frozen=True)
class CategoryTimeline:
    """A curve per category and its maximum in `unit`, with marks at the peak, in `peak_stage`, and at a failure."""

    over_time: OverTime
    unit: Unit
    peak_stage: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        over_time = self.over_time
        names = list(over_time.categories)[:MAX_LINES]
        highest = max(over_time.most_bytes.values(), default=1)
        label, figures = max(map(len, (*names, "step"))), len(self.unit.format(highest))
        columns = options.max_width - 2 - label - 2 - 2 - figures
        if columns < _MIN_COLUMNS:
            return
        columns = min(columns, over_time.num_events)
        shown = self._choose_moments(columns)
        lines = [
            Text(
                f"{name:<{label}}  {draw_curve((over_time.categories[name][at] for at in shown), highest)}  "
                f"{self.unit.format(over_time.most_bytes[name]):>{figures}}"
            )
            for name in names
        ]
        marks = [" "] * columns
        marks[shown.index(over_time.events.index(over_time.peak_event))] = "^"
        legend = f"^ the peak, in {self.peak_stage}"
        if over_time.failed_event is not None:
            place = min(over_time.failed_event * columns // over_time.num_events, columns - 1)
            both = marks[place] == "^"
            marks[place] = "‼" if both else "!"
            legend = f"‼ {legend[2:]}, and the" if both else f"{legend}; ! the"
            legend += " request that the GPU refuses"
        lines.append(dim(f"{'':<{label}}  {''.join(marks).rstrip()}"))
        if steps := self._format_steps(columns):
            lines.append(dim(f"{'step':<{label}}  {steps}"))
        yield make_heading(
            "Over the run, ", f"{self.unit.name}, event by event; behind each line the most that it reaches"
        )
        yield indent(*lines, dim(legend), below=1)

    def _choose_moments(self, columns: int) -> list[int]:
        """Return the index of the moment shown in each column: the one with the most allocated bytes in the column."""
        over_time, moments = self.over_time, len(self.over_time.events)
        if columns >= moments:
            return [column * moments // columns for column in range(columns)]
        peak = over_time.events.index(over_time.peak_event)
        shown = []
        for column in range(columns):
            within = range(moments * column // columns, moments * (column + 1) // columns)
            shown.append(peak if peak in within else max(within, key=over_time.allocated_bytes.__getitem__))
        return shown

    def _format_steps(self, columns: int) -> str:
        """Return a line with step numbers at the columns where the steps begin; numbers that overlap are left out."""
        line = ""
        for step, begin in self.over_time.steps:
            place = min(begin * columns // self.over_time.num_events, columns - 1)
            if place >= len(line) + bool(line) and place + len(str(step)) <= columns:
                line = f"{line:<{place}}{step}"
        return line
