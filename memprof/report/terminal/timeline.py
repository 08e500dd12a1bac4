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
    """A curve of bytes over the run for each category, with marks at the peak and at the failed allocation."""

    over_time: OverTime
    unit: Unit
    peak_stage: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        over_time = self.over_time
        names = list(over_time.categories)[:MAX_LINES]
        highest = max(over_time.most_bytes.values(), default=1)
        label_width, size_width = max(map(len, (*names, "step"))), len(self.unit.format(highest))
        columns = options.max_width - 2 - label_width - 2 - 2 - size_width
        if columns < _MIN_COLUMNS:
            return
        columns = min(columns, over_time.num_events)
        moments = self._choose_moments(columns)
        lines = [
            Text(
                f"{name:<{label_width}}  {draw_curve((over_time.categories[name][i] for i in moments), highest)}  "
                f"{self.unit.format(over_time.most_bytes[name]):>{size_width}}"
            )
            for name in names
        ]
        marks = [" "] * columns
        marks[moments.index(over_time.events.index(over_time.peak_event))] = "^"
        legend = f"^ the peak, in {self.peak_stage}"
        if over_time.failed_event is not None:
            column = min(over_time.failed_event * columns // over_time.num_events, columns - 1)
            is_same = marks[column] == "^"
            marks[column] = "‼" if is_same else "!"
            legend = f"‼ {legend[2:]}, and the" if is_same else f"{legend}; ! the"
            legend += " request that the GPU refuses"
        lines.append(dim(f"{'':<{label_width}}  {''.join(marks).rstrip()}"))
        if steps := self._format_steps(columns):
            lines.append(dim(f"{'step':<{label_width}}  {steps}"))
        yield make_heading(
            "Over the run, ", f"{self.unit.name}, event by event; behind each line the most that it reaches"
        )
        yield indent(*lines, dim(legend), below=1)

    def _choose_moments(self, columns: int) -> list[int]:
        """Return the index of the moment shown in each of `columns` columns: that with the most allocated bytes."""
        over_time, num_moments = self.over_time, len(self.over_time.events)
        if columns >= num_moments:
            return [column * num_moments // columns for column in range(columns)]
        peak = over_time.events.index(over_time.peak_event)
        indices = []
        for column in range(columns):
            moments = range(num_moments * column // columns, num_moments * (column + 1) // columns)
            indices.append(peak if peak in moments else max(moments, key=over_time.allocated_bytes.__getitem__))
        return indices

    def _format_steps(self, columns: int) -> str:
        """Return a line with step numbers at the columns where the steps begin; numbers that overlap are left out."""
        line = ""
        for step, begin in self.over_time.steps:
            column = min(begin * columns // self.over_time.num_events, columns - 1)
            if column >= len(line) + bool(line) and column + len(str(step)) <= columns:
                line = f"{line:<{column}}{step}"
        return line
