"""From which private memory pool of the caching allocator a program takes its memory (`torch.cuda.MemPool`)."""

from __future__ import annotations

from memprof.torch_private import autograd
from memprof.trace.events import Event, EventKind, Trace

_current_graph_task = autograd.current_graph_task_id


class ActivePool:
    """Keeps track of the active pool for one trace; a program that has no private pool never asks it for anything."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.used = False  # Whether the program has ever taken memory from a private pool.
        self._closed = False
        # The active pool (0: the default one), and whether it is that of the thread that activated it alone.
        self._active, self._of_thread = 0, False
        self._of_trace = 0  # The pool of the last allocation in the trace.

    def select(self, pool: int, *, of_thread: bool) -> tuple[int, bool]:
        """Take memory of GPUs from `pool` (0: the default one) from here on; return what was set before.

        `of_thread`: backward passes, which run in threads of their own, take none of it.
        """
        before = self._active, self._of_thread
        self._active, self._of_thread = pool, of_thread
        self.used = self.used or pool != 0
        return before

    def note_allocation(self) -> None:
        """Append the change of pool, if the allocation that comes next is from another one than the last."""
        pool = 0 if self._of_thread and _current_graph_task() != -1 else self._active
        if pool != self._of_trace:
            self._of_trace = pool
            self._trace.events.append(Event(EventKind.POOL, pool))

    def append_release(self, pool: int) -> None:
        """Append that nothing keeps `pool` any more."""
        if not self._closed:
            self._trace.events.append(Event(EventKind.POOL_FREE, pool))

    def close(self) -> None:
        """Append nothing from now on."""
        self._closed = True
