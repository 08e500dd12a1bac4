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

PIPE_INTERVAL = 10.0  # seconds between two lines where stderr is no terminal
_FIRST_DELAY, _REDRAW_INTERVAL = 2.0, 0.5  # seconds on a terminal until the first line, and between updates


class Progress:
    """A progress display: a thread prints after two seconds, or every ten without a terminal; never if `quiet`."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._begin = time.monotonic()
        self._shown = False
        self._work = ""
        self._is_terminal = sys.stderr.isatty()
        self._ended = threading.Event()
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

    def _format_line(self) -> str:
        """Return the progress line: work, progress and elapsed seconds."""
        known = sys.modules.get("memprof.flows.progress")  # not imported: the work reports no progress
        progress = "" if known is None else known.progress_text()
        return f"memprof: {self._work}{f', {progress}' if progress else ''} ({time.monotonic() - self._begin:.0f} s)"

    def _redraw_regularly(self) -> None:
        self._ended.wait(_FIRST_DELAY)
        while not self._ended.wait(_REDRAW_INTERVAL):
            if self._work:
                with contextlib.suppress(OSError, ValueError):
                    columns = os.get_terminal_size(sys.stderr.fileno()).columns
                    sys.stderr.write(f"\r\033[K{self._format_line()[: max(columns - 1, 20)]}")
                    sys.stderr.flush()
                    self._shown = True

    def _write_regularly(self) -> None:
        while not self._ended.wait(PIPE_INTERVAL):
            if self._work:
                sys.stderr.write(f"{self._format_line()}\n")
                sys.stderr.flush()

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(1.0)  # no line after the report begins
        if self._shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


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
