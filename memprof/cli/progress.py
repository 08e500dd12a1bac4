"""Display of a long command's progress on stderr: one redrawn line on a terminal, plain lines in a pipe.

A line has the current work, its progress if known (flows/progress.py), and the elapsed seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
import time

from memprof.errors import printable

_ROOM = 40  # columns for what stands in a line beside the estimate and the work
PIPE_INTERVAL = 10.0  # seconds between two lines where stderr is no terminal
_FIRST_DELAY, _REDRAW_INTERVAL = 2.0, 0.5  # seconds on a terminal until the first line, and between updates


class Progress:
    """A progress line on stderr, printed by a thread: redrawn on a terminal, else every 10 seconds; none if `quiet`."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._start = time.monotonic()
        self._has_drawn = False
        self._work = ""
        self._estimate = ""
        self._is_terminal = sys.stderr.isatty()
        self._stop_event = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if not self._quiet:
            target = self._redraw_regularly if self._is_terminal else self._write_regularly
            thread = threading.Thread(target=target, name="memprof progress", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can start: the work goes on without progress
                thread.start()
                self._thread = thread
        return self

    def __call__(self, work: str) -> None:
        """Set the description of the current work."""
        self._work = printable(work)

    @property
    def shows_estimates(self) -> bool:
        """Return whether `show_estimate` draws its line: on a terminal, unless `quiet`."""
        return self._is_terminal and not self._quiet

    def show_estimate(self, estimate: str) -> None:
        """Draw at once what is estimated of the work, which has not begun; kept before the work where there is room."""
        self._estimate = printable(estimate)
        if self.shows_estimates:
            self._draw(f"memprof: {self._estimate}; running it...")

    def _draw(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"\r\033[K{line[: max(_count_columns() - 1, 20)]}")
            sys.stderr.flush()
            self._has_drawn = True

    def _format_line(self) -> str:
        """Return the progress line: work, progress and elapsed seconds."""
        progress_module = sys.modules.get("memprof.flows.progress")  # not imported: the work reports no progress
        progress = "" if progress_module is None else progress_module.describe_progress()
        # The estimate goes where it would leave no room: not with each layer, but with the work.
        has_room = len(self._estimate) + len(self._work) + _ROOM < _count_columns()
        estimate = f"{self._estimate}; " if self._estimate and has_room else ""
        seconds = f"{time.monotonic() - self._start:.0f} s"
        return f"memprof: {estimate}{self._work}{f', {progress}' if progress else ''} ({seconds})"

    def _redraw_regularly(self) -> None:
        self._stop_event.wait(_FIRST_DELAY)
        while not self._stop_event.wait(_REDRAW_INTERVAL):
            if self._work:
                self._draw(self._format_line())

    def _write_regularly(self) -> None:
        while not self._stop_event.wait(PIPE_INTERVAL):
            if self._work:
                sys.stderr.write(f"{self._format_line()}\n")
                sys.stderr.flush()

    def __exit__(self, *exc: object) -> None:
        self._stop_event.set()
        if self._thread is not None:
            self._thread.join(1.0)  # no line after the report begins
        if self._has_drawn:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def _count_columns() -> int:
    """Return the columns of the terminal that stderr is; 0: stderr is none."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 0


def show_progress(*, quiet: bool = False) -> Progress:
    """Disable garbage collection, also at exit, and return a progress display.

    For work that creates millions of permanent objects, such as importing torch: collections would take a third of the
    time of `memprof profile`, and more of `memprof analyze`.
    """
    gc.disable()
    atexit.register(_skip_final_collection)
    return Progress(quiet=quiet)


def _skip_final_collection() -> None:
    """Freeze all objects, so that Python collects no garbage at exit.

    With nanobind (in Triton from release 3.9) unfreeze instead: its libraries would print leaked objects to stderr.
    """
    has_nanobind = any(kind.__module__ == "nanobind" for kind in type.__subclasses__(type))
    (gc.unfreeze if has_nanobind else gc.freeze)()
