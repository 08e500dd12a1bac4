"""Progress on stderr: one line, rewritten, shown only to people and only when it takes a while."""

from __future__ import annotations

import gc
import sys
import time

from memprof.errors import printable


class Progress:
    """Says what is being done; silent for the first two seconds and where stderr is no terminal."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._shown = False
        self._enabled = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def __call__(self, doing: str) -> None:
        """Say what is being done now."""
        if self._enabled and time.monotonic() - self._begin > 2:
            sys.stderr.write(f"\r\033[Kmemprof: {printable(doing)} …")
            sys.stderr.flush()
            self._shown = True

    def __exit__(self, *exc: object) -> None:
        if self._shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def long_work() -> Progress:
    """The progress of what makes millions of objects that live for good, as importing torch and reading a trace do.

    From here on no garbage is looked for: that would take a fifth of the time of `memprof profile`, and more of
    `memprof analyze`.
    """
    gc.disable()
    return Progress()
