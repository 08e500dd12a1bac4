"""Turns of the program's threads: one at a time runs an operator on the virtual GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from memprof.watch.trace_writer import TraceWriter


class Turn:
    """One thread's turn."""

    def __init__(self, writer: TraceWriter, thread: str = "", begin: Callable[[], None] | None = None) -> None:
        self._writer = writer
        self.thread = thread
        self._begin = begin
        self.is_taken = False

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, no other thread runs an operator. When the run is over, threads of it end here."""
        with self._writer.lock:
            if self.thread and self._writer.closed:
                raise SystemExit
            if self._begin is not None:
                self._begin()
                self._begin = None
            self.is_taken = True
            try:
                yield
            finally:
                self.is_taken = False

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, the program's own code runs, which may wait for another thread."""
        if not self.is_taken:
            yield
            return
        self.is_taken = False
        self._writer.lock.release()
        try:
            yield
        finally:
            self._writer.lock.acquire()
            self.is_taken = True
