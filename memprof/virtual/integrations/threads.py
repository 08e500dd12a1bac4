"""Threads that the program starts: they see the virtual GPU too.

torch's modes belong to one thread, so each thread of the program's enters its own when it begins, and leaves them when
it ends. What they share (the trace, where each tensor lives, what is known of its numbers) is written under the
recorder's lock, by one operator at a time; what CUDA has for each thread (the current GPU and streams, the handle of
cuBLAS with its workspace) is that thread's. In which order threads come is left to Python, as it is on a GPU.

Threads that torch, memprof or Python's multiprocessing start are left alone.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import sys
import sysconfig
import threading
import weakref
from collections.abc import Iterator
from types import FrameType

from memprof.patching import Extension, Patch
from memprof.torch_private import dispatch
from memprof.virtual.device_state import Turn
from memprof.virtual.install_context import InstallContext
from memprof.watch.program_code import is_program_file

_STDLIB = sysconfig.get_path("stdlib") + os.sep
_HERE = os.path.dirname(__file__) + os.sep
_ORDER = (
    "The program works with tensors in threads of its own: what these take comes in the order in which it came here, "
    "which may be another the next time."
)


class Threads(Extension):
    """Threads of the program: each has modes of its own, which begin with its first tensor."""

    def __init__(self) -> None:
        self._simulated: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._numbers: set[int] = set()

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Replace what every thread begins with."""
        start, bootstrap = threading.Thread.start, "_bootstrap_inner"
        original = getattr(threading.Thread, bootstrap)

        def starting(thread: threading.Thread) -> None:
            target = getattr(thread, "_target", None)
            is_of_queue = getattr(target, "__module__", "") == "multiprocessing.queues"  # what it writes with
            if is_of_program(sys._getframe(1)) and not is_of_queue:
                self._simulated.add(thread)
            start(thread)

        def run(thread: threading.Thread) -> None:
            with self._entered(context) if thread in self._simulated else contextlib.nullcontext():
                original(thread)

        starting.__name__ = starting.__qualname__ = start.__name__
        yield threading.Thread, "start", starting
        yield threading.Thread, bootstrap, run

    @contextlib.contextmanager
    def _entered(self, context: InstallContext) -> Iterator[None]:
        tracker = copy.copy(context.tracker)
        dispatch.TorchDispatchMode.__init__(tracker)  # what a mode remembers of those around it is its thread's
        with tracker.recorder.writer.lock:
            # A handle of cuBLAS is the next thread's when its own has ended (CublasHandlePool.cpp).
            number = next(one for one in itertools.count(1) if one not in self._numbers)
            self._numbers.add(number)
        tracker.turn = Turn(tracker.recorder.writer, f"thread {number}", lambda: context.assume(_ORDER))
        tracker.recorder.writer.mark_worker_thread()
        tracker.function_mode = context.function_mode.of_thread(tracker)
        with tracker.function_mode:
            dispatch.push_dispatch_mode(tracker)
            try:
                yield
            finally:
                dispatch.pop_dispatch_mode()
                self._numbers.discard(number)


def is_of_program(frame: FrameType | None) -> bool:
    """Return whether a thread is started by the program or one of its libraries, and not by torch or memprof."""
    while frame is not None and frame.f_code.co_filename.startswith((_STDLIB, _HERE, "<frozen")):
        if "-packages" in frame.f_code.co_filename:
            break
        frame = frame.f_back
    name = "" if frame is None else frame.f_code.co_filename
    return is_program_file(name)
