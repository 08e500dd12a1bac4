"""Threads of the program: a thread that ends with an error of memprof ends the run.

Reasons for such an error: the run's last step is reached, an allocation failed, an operation cannot be simulated, or
the thread has no access to the virtual GPU (torch's own threads, and threads started before the run). If the run went
on, the program would wait for the thread's result, or continue without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from memprof.errors import MemprofError
from memprof.patching import Patch
from memprof.script.stop import StopRun
from memprof.watch.failure import KernelError, TracingError, is_caused_by_oom, is_missing_gpu_error

_OTHER_THREAD_NOTE = (
    "memprof: raised in {thread}, which does not see the virtual GPU: only threads that the program starts do.\n"
    "  hint:  have the thread make host tensors, and move them to the GPU where the program trains"
)


class ThreadWatch:
    """Watch for the first thread that ends with an error of memprof; calls `stop`, which ends the program."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self.error: BaseException | None = None  # the thread's exception

    def patches(self) -> Iterator[Patch]:
        """Yield the patches (owner, name, replacement) that see exceptions end threads."""
        original = threading.excepthook

        def on_thread_error(args: threading.ExceptHookArgs) -> None:
            error = args.exc_value
            if isinstance(error, StopRun):
                self._stop()
            elif error is None or not _is_memprof_error(error):
                original(args)
            elif self.error is None:
                if is_missing_gpu_error(error):
                    thread = "another thread" if args.thread is None else f"thread {args.thread.name!r}"
                    error.add_note(_OTHER_THREAD_NOTE.format(thread=thread))
                self.error = error
                self._stop()

        yield threading, "excepthook", on_thread_error


def _is_memprof_error(error: BaseException) -> bool:
    refused = isinstance(error, (MemprofError, KernelError, TracingError))
    return refused or is_missing_gpu_error(error) or is_caused_by_oom(error)
