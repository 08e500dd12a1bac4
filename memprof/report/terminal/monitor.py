"""Output of `memprof monitor`: a live table of GPUs, a footer below a command's output, plain lines, or JSON.

The footer uses a scroll region of the terminal: the command's output scrolls in the rows above.
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
from memprof.report.terminal.console import dim, open_console, to_ansi
from memprof.report.terminal.monitor_text import (
    SampleHistory,
    format_outcome,
    format_sample,
    render_footer,
    render_gpus_table,
)

_MIN_ROWS = 12  # A terminal with fewer rows gets no footer.


def make_view(stream: TextIO, *, has_command: bool, as_json: bool = False, quiet: bool = False) -> View:
    """Return the view for `stream`: a live table or footer on a terminal, lines in a file or a pipe."""
    if as_json:
        return JsonView(stream, raises_errors=not has_command)
    if quiet:
        return QuietView(stream, raises_errors=not has_command)
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return PlainView(stream, raises_errors=not has_command)
    return FooterView(stream) if has_command else LiveView(stream)


class _LineWriter:
    """A writer of lines to `stream`; write errors are raised if `raises_errors`, else ignored."""

    def __init__(self, stream: TextIO, *, raises_errors: bool = False) -> None:
        self._stream = stream
        self._raises_errors = raises_errors
        self._written_notes: set[str] = set()

    def write(self, text: str) -> None:
        """Write `text` and a line feed, and flush the stream."""
        self.write_raw(printable(text) + "\n")

    def write_raw(self, text: str) -> None:
        """Write `text`, and flush the stream."""
        encoding = self._stream.encoding or "utf-8"
        try:
            # The stream's encoding may lack the characters of curves.
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()
        except OSError:
            if self._raises_errors:
                raise

    def pause(self) -> None:
        """Do nothing: a view of plain lines has nothing to clear on the terminal."""

    def write_new_notes(self, notes: Iterable[str]) -> None:
        """Write each note, unless a note that is equal up to its first semicolon was written before."""
        for note in notes:
            kind = note.partition(";")[0]  # without what it counts ("; 3 lines are missing")
            if kind not in self._written_notes:
                self._written_notes.add(kind)
                self.write(f"memprof: {note}")


class JsonView(_LineWriter):
    """A view that writes one JSON object per line: each sample, and finally the outcome of the command."""

    def show(self, sample: MonitorSample, peaks: Peaks) -> None:
        """Write a sample as JSON."""
        from memprof.report.documents.command_results import (
            MonitorLine,  # imported here: it imports many other documents
        )

        self.write(json.dumps(MonitorLine.from_sample(sample, peaks).to_json()))

    def close(self, outcome: MonitorOutcome) -> None:
        """Write the outcome of a watched command as JSON."""
        if outcome.command:
            from memprof.report.documents.command_results import MonitorEnd

            self.write(json.dumps(MonitorEnd(outcome=outcome).to_json()))


class QuietView(_LineWriter):
    """A view that writes only notes on missing measurements, and at the end the outcome of the command."""

    def show(self, sample: MonitorSample, peaks: Peaks) -> None:
        """Write the notes of a sample that were not written before."""
        self.write_new_notes(sample.notes)

    def close(self, outcome: MonitorOutcome) -> None:
        """Write the outcome of the command: how it ended, and its peaks."""
        self.write_new_notes(outcome.notes)
        if outcome.command:
            self.write(f"memprof: {format_outcome(outcome)}")


class PlainView(QuietView):
    """A view that writes one line per sample."""

    def show(self, sample: MonitorSample, peaks: Peaks) -> None:
        """Write a line for the sample, if it has GPUs or processes."""
        super().show(sample, peaks)
        if sample.gpus or sample.processes:
            self.write(format_sample(sample))


class LiveView:
    """A view that redraws a table of GPUs in place on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._console = open_console(stream)
        self._live: Live | None = None
        self._history = SampleHistory()

    def show(self, sample: MonitorSample, peaks: Peaks) -> None:
        """Redraw the table with the values of `sample`."""
        if not sample.gpus:
            for note in sample.notes:
                self._console.print(f"memprof: {note}", soft_wrap=True)
            return
        self._history.add(sample)
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(render_gpus_table(sample, peaks, self._history), refresh=True)

    def pause(self) -> None:
        """Stop redrawing, and restore the cursor."""
        if self._live is not None:
            with contextlib.suppress(OSError):  # the terminal may be gone
                self._live.stop()
            self._live = None

    def close(self, outcome: MonitorOutcome) -> None:
        """Stop redrawing; the last table stays on the screen."""
        self.pause()


class FooterView(QuietView):
    """A view of samples in the last rows of the terminal, below the output of the watched command."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._history = SampleHistory()
        self._size = (0, 0)
        self._num_rows = 0  # Rows of the footer now.
        self._needed_rows = 0

    def show(self, sample: MonitorSample, peaks: Peaks) -> None:
        """Draw the footer; set the scroll region first if the size has changed."""
        self._history.add(sample)
        try:
            columns, rows = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            return
        if rows < _MIN_ROWS or not sample.processes:
            return
        lines = render_footer(sample, peaks, self._history)[: rows // 3]
        # The footer never shrinks, which would move the command's output.
        self._needed_rows = min(max(self._needed_rows, len(lines) + 1), rows // 3 + 1)
        if (columns, rows) != self._size or self._num_rows != self._needed_rows:
            self.pause()
            self._size, self._num_rows = (columns, rows), self._needed_rows
            # Line feeds scroll the output up by the footer's height.
            scroll = "\n" * self._num_rows + f"\x1b[{self._num_rows}A"
            self.write_raw(f"{scroll}\x1b7\x1b[1;{rows - self._num_rows}r\x1b8")
        footer = [dim("─" * columns), *lines]
        footer += [Text("")] * (self._num_rows - len(footer))
        first_row = rows - self._num_rows + 1
        cells = [f"\x1b[{first_row + i};1H\x1b[2K{to_ansi(line, columns)}" for i, line in enumerate(footer)]
        self.write_raw("\x1b7" + "".join(cells) + "\x1b8")

    def pause(self) -> None:
        """Clear the footer, and reset the scroll region."""
        if self._num_rows:
            first_row = self._size[1] - self._num_rows + 1
            self.write_raw(f"\x1b7\x1b[r\x1b[{first_row};1H\x1b[J\x1b8")
            self._num_rows = 0

    def close(self, outcome: MonitorOutcome) -> None:
        """Clear the footer, and write the outcome in one line."""
        self.pause()
        super().close(outcome)
