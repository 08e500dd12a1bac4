"""Threads of the program's own: one that ends of what memprof raised ends the run.

It may train, and have shown enough; be refused memory, or what cannot be simulated; or be one that does not see the
virtual GPU (threads that torch starts, or that were there before). The thread is gone then, and the program waits for
what it was to make, or goes on without.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from memprof.errors import MemprofError
from memprof.patching import Patch
from memprof.script.stop import StopRun
from memprof.watch.failure import KernelError, TracingError, is_caused_by_oom, is_missing_gpu_error

_NOTE = (
    "memprof: raised in {thread}, which does not see the virtual GPU: only threads that the program starts do.\n"
    "  hint:  have the thread make host tensors, and move them to the GPU where the program trains"
)


class ThreadWatch:
    """Notes the first thread that ends of what memprof raised, and calls `stop`, which ends the program."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self.error: BaseException | None = None  # what that thread raised

    def patches(self) -> Iterator[Patch]:
        """Yield the patches (owner, name, replacement) that see threads die."""
        original = threading.excepthook

        def thread_died(args: threading.ExceptHookArgs) -> None:
            error = args.exc_value
            if isinstance(error, StopRun):
                self._stop()
            elif error is None or not _ends_the_run(error):
                original(args)
            elif self.error is None:
                if is_missing_gpu_error(error):
                    thread = "another thread" if args.thread is None else f"thread {args.thread.name!r}"
                    error.add_note(_NOTE.format(thread=thread))
                self.error = error
                self._stop()

        yield threading, "excepthook", thread_died


def _ends_the_run(error: BaseException) -> bool:
    refused = isinstance(error, (MemprofError, KernelError, TracingError))
    return refused or is_missing_gpu_error(error) or is_caused_by_oom(error)
