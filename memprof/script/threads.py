"""Threads of the program: a thread that ends with an error of memprof ends the run.

Such a thread has reached the last step of the run, run out of memory, called an operation that is not simulated, or
does not see the virtual GPU (a thread of torch, or one from before the run). Without it the program would wait for its
result, or continue incorrectly.
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
    """Watch for threads that end with an error of memprof; the first one's error is kept, and `stop()` is called."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self.error: BaseException | None = None  # the thread's exception

    def patches(self) -> Iterator[Patch]:
        """Yield the patch (owner, name, replacement) of `threading.excepthook`."""
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
    is_own_class = isinstance(error, (MemprofError, KernelError, TracingError))
    return is_own_class or is_missing_gpu_error(error) or is_caused_by_oom(error)
