"""Progress on stderr, only when it takes a while: one line, rewritten, for people; in a pipe plain lines.

It says what is being done, how far that is where somebody knows (flows/progress.py), and for how long it has been.
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

EVERY = 10.0  # seconds between two lines where stderr is no terminal
_FIRST, _AGAIN = 2.0, 0.5  # seconds on a terminal until the line is there, and until it is written anew


class Progress:
    """Says what is being done; silent for the first two seconds, or ten where stderr is no terminal, or for good."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._begin = time.monotonic()
        self._shown = False
        self._doing = ""
        self._for_people = sys.stderr.isatty()
        self._ended = threading.Event()
        self._teller: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if not self._quiet:
            tell = self._redraw_regularly if self._for_people else self._write_regularly
            teller = threading.Thread(target=tell, name="memprof progress", daemon=True)
            with contextlib.suppress(RuntimeError):  # no room for it: what is being done counts for more
                teller.start()
                self._teller = teller
        return self

    def __call__(self, doing: str) -> None:
        """Say what is being done now."""
        self._doing = printable(doing)

    def _line(self) -> str:
        """Return what is being done, and how far."""
        known = sys.modules.get("memprof.flows.progress")  # of work that cannot say, it was not imported
        far = "" if known is None else known.progress_text()
        return f"memprof: {self._doing}{f', {far}' if far else ''} ({time.monotonic() - self._begin:.0f} s)"

    def _redraw_regularly(self) -> None:
        self._ended.wait(_FIRST)
        while not self._ended.wait(_AGAIN):
            if self._doing:
                with contextlib.suppress(OSError, ValueError):
                    columns = os.get_terminal_size(sys.stderr.fileno()).columns
                    sys.stderr.write(f"\r\033[K{self._line()[: max(columns - 1, 20)]}")
                    sys.stderr.flush()
                    self._shown = True

    def _write_regularly(self) -> None:
        while not self._ended.wait(EVERY):
            if self._doing:
                sys.stderr.write(f"{self._line()}\n")
                sys.stderr.flush()

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        if self._teller is not None:
            self._teller.join(1.0)  # not a line between those of the report
        if self._shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def long_work(*, quiet: bool = False) -> Progress:
    """Return the progress of what makes millions of objects that live for good, as importing torch does.

    From here on no garbage is looked for, nor when the process ends: that would take a third of the time of `memprof
    profile`, and more of `memprof analyze`.
    """
    gc.disable()
    atexit.register(_leave_garbage)
    return Progress(quiet=quiet)


def _leave_garbage() -> None:
    """Have Python look for none on the way out.

    Libraries that are made with nanobind (Triton from release 3.9) write to stderr about what of theirs is left: where
    its metaclass is there, Python looks.
    """
    by_nanobind = any(kind.__module__ == "nanobind" for kind in type.__subclasses__(type))
    (gc.unfreeze if by_nanobind else gc.freeze)()
