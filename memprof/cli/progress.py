"""Progress on stderr, only when it takes a while: one line, rewritten, for people; in a pipe plain lines."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time

from memprof.errors import printable

EVERY = 10.0
"""Seconds between two lines where stderr is no terminal."""


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
        if not self._for_people and not self._quiet:
            teller = threading.Thread(target=self._say_now_and_then, name="memprof progress", daemon=True)
            with contextlib.suppress(RuntimeError):  # no room for it: what is being done counts for more
                teller.start()
                self._teller = teller
        return self

    def __call__(self, doing: str) -> None:
        """Say what is being done now."""
        self._doing = printable(doing)
        if self._for_people and not self._quiet and time.monotonic() - self._begin > 2:
            sys.stderr.write(f"\r\033[Kmemprof: {self._doing} …")
            sys.stderr.flush()
            self._shown = True

    def _say_now_and_then(self) -> None:
        while not self._ended.wait(EVERY):
            if self._doing:
                sys.stderr.write(f"memprof: {self._doing} ({time.monotonic() - self._begin:.0f} s)\n")
                sys.stderr.flush()

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        if self._teller is not None:
            self._teller.join(1.0)  # not a line between those of the report
        if self._shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def long_work(*, quiet: bool = False) -> Progress:
    """The progress of what makes millions of objects that live for good, as importing torch and reading a trace do.

    From here on no garbage is looked for: that would take a fifth of the time of `memprof profile`, and more of
    `memprof analyze`.
    """
    gc.disable()
    return Progress(quiet=quiet)
