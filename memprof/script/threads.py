"""Threads of the program's own, which do not see the virtual GPU: one that dies of it ends the run.

The modes that are the virtual GPU belong to one thread. Where another asks for CUDA, torch says that there is none. The
thread is gone then, and the program waits for what it was to make, or goes on without.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from memprof.watch.failure import finds_no_card
from memprof.watch.patches import Patch

_NOTE = (
    "memprof: raised in {thread}: threads of the program's own do not see the virtual GPU.\n"
    "  hint:  have the thread make host tensors, and move them to the card where the program trains"
)


class ThreadWatch:
    """Notes the first thread that dies because it sees no card, and calls `stop`, which ends the program."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self.error: BaseException | None = None
        """What that thread raised."""

    def patches(self) -> Iterator[Patch]:
        """The patches (owner, name, replacement) that see threads die."""
        original = threading.excepthook

        def thread_died(args: threading.ExceptHookArgs) -> None:
            error = args.exc_value
            if error is None or not finds_no_card(error):
                original(args)
            elif self.error is None:
                thread = "another thread" if args.thread is None else f"thread {args.thread.name!r}"
                error.add_note(_NOTE.format(thread=thread))
                self.error = error
                self._stop()

        yield threading, "excepthook", thread_died
