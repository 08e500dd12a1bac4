"""The views of `memprof monitor`: a live table of the GPUs, rows at the bottom of a command's terminal, lines, JSON.

A command keeps its terminal: the view takes the last rows by a scroll region, so that the command's own output
continues as in a slightly smaller terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from typing import TextIO

from rich.live import Live
from rich.text import Text

from memprof.errors import printable
from memprof.monitor.run import MonitorOutcome, View
from memprof.monitor.sample import MonitorSample, Peaks
from memprof.report.terminal.console import ansi, dim, terminal
from memprof.report.terminal.monitor_text import SampleHistory, footer_lines, gpus_table, plain_line, summary

_MIN_ROWS = 12  # A terminal with fewer rows is left to the command.


def make_view(stream: TextIO, *, has_command: bool, as_json: bool = False, quiet: bool = False) -> View:
    """Return the view for `stream`: a picture on a terminal, lines in a file or a pipe."""
    if as_json:
        return JsonView(stream, is_needed=not has_command)
    if quiet:
        return QuietView(stream, is_needed=not has_command)
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return PlainView(stream, is_needed=not has_command)
    return FooterView(stream) if has_command else LiveView(stream)


class _Lines:
    """A writer of lines; a closed reader is an error only where the lines are the only output."""

    def __init__(self, stream: TextIO, *, is_needed: bool = False) -> None:
        self._stream = stream
        self._is_needed = is_needed
        self._said: set[str] = set()

    def write(self, text: str) -> None:
        """Write `text` and a line feed at once."""
        self.write_raw(printable(text) + "\n")

    def write_raw(self, text: str) -> None:
        """Write `text` at once."""
        encoding = self._stream.encoding or "utf-8"
        try:
            # A terminal of another encoding may lack the bars.
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()
        except OSError:
            if self._is_needed:
                raise

    def pause(self) -> None:
        """Do nothing: lines need no cleanup."""

    def say_once(self, notes: Iterable[str]) -> None:
        """Write the notes that were not written before; notes that differ only in a number count as the same."""
        for note in notes:
            kind = note.partition(";")[0]  # without what it counts ("; 3 lines are missing")
            if kind not in self._said:
                self._said.add(kind)
                self.write(f"memprof: {note}")


class JsonView(_Lines):
    """A view of one JSON object per line: the samples, and finally the outcome."""

    def show(self, sample: MonitorSample, peaks: Peaks) -> None:
        """Write a sample as JSON."""
        from memprof.report.documents.answers import MonitorLine  # which takes in what other commands need

        self.write(json.dumps(MonitorLine.of(sample, peaks).to_json()))

    def close(self, outcome: MonitorOutcome) -> None:
        """Write the outcome as JSON."""
        if outcome.command:
            from memprof.report.documents.answers import MonitorEnd

            self.write(json.dumps(MonitorEnd(outcome=outcome).to_json()))


class QuietView(_Lines):
    """A view without output until the end: notes on missing readings, and the outcome of the command."""

    def show(self, sample: MonitorSample, peaks: Peaks) -> None:
        """Write the notes of a sample."""
        self.say_once(sample.notes)

    def close(self, outcome: MonitorOutcome) -> None:
        """Write how the command ended."""
        self.say_once(outcome.notes)
        if outcome.command:
            self.write(f"memprof: {summary(outcome)}")


class PlainView(QuietView):
    """A line for each sample."""

    def show(self, sample: MonitorSample, peaks: Peaks) -> None:
        """Write a line for the sample, if it has GPUs or processes."""
        super().show(sample, peaks)
        if sample.gpus or sample.processes:
            self.write(plain_line(sample))


class LiveView:
    """A table of the GPUs on a terminal, redrawn in place."""

    def __init__(self, stream: TextIO) -> None:
        self._console = terminal(stream)
        self._live: Live | None = None
        self._history = SampleHistory()

    def show(self, sample: MonitorSample, peaks: Peaks) -> None:
        """Draw the sample over the last one."""
        if not sample.gpus:
            for note in sample.notes:
                self._console.print(f"memprof: {note}", soft_wrap=True)
            return
        self._history.add(sample)
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(gpus_table(sample, peaks, self._history), refresh=True)

    def pause(self) -> None:
        """Stop the drawing, and restore the cursor."""
        if self._live is not None:
            with contextlib.suppress(OSError):  # the terminal may be gone
                self._live.stop()
            self._live = None

    def close(self, outcome: MonitorOutcome) -> None:
        """Stop the drawing; the last picture stays."""
        self.pause()


class FooterView(QuietView):
    """A view in the last rows of the terminal that a command writes to."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._history = SampleHistory()
        self._size = (0, 0)
        self._height = 0  # Rows that are taken now.
        self._wanted = 0

    def show(self, sample: MonitorSample, peaks: Peaks) -> None:
        """Draw the rows; reserve them first if needed."""
        self._history.add(sample)
        try:
            columns, rows = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            return
        if rows < _MIN_ROWS or not sample.processes:
            return
        lines = footer_lines(sample, peaks, self._history)[: rows // 3]
        # As many rows as ever were needed: a view that grows and shrinks would move the command's output.
        self._wanted = min(max(self._wanted, len(lines) + 1), rows // 3 + 1)
        if (columns, rows) != self._size or self._height != self._wanted:
            self.pause()
            self._size, self._height = (columns, rows), self._wanted
            # Make room below the cursor, and keep what scrolls off it.
            room = "\n" * self._height + f"\x1b[{self._height}A"
            self.write_raw(f"{room}\x1b7\x1b[1;{rows - self._height}r\x1b8")
        drawn = [dim("─" * columns), *lines]
        drawn += [Text("")] * (self._height - len(drawn))
        first = rows - self._height + 1
        cells = [f"\x1b[{first + number};1H\x1b[2K{ansi(line, columns)}" for number, line in enumerate(drawn)]
        self.write_raw("\x1b7" + "".join(cells) + "\x1b8")

    def pause(self) -> None:
        """Release the rows."""
        if self._height:
            first = self._size[1] - self._height + 1
            self.write_raw(f"\x1b7\x1b[r\x1b[{first};1H\x1b[J\x1b8")
            self._height = 0

    def close(self, outcome: MonitorOutcome) -> None:
        """Release the rows, and write the outcome in one line."""
        self.pause()
        super().close(outcome)
