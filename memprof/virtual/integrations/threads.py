"""Threads that the program starts, which can use the virtual GPU like the main thread.

torch's modes belong to one thread, so each thread of the program enters modes of its own when it begins, and leaves
them when it ends. Shared state (the trace, the tensors' devices, the known numbers) is written under the recorder's
lock, by one operator at a time. State that CUDA has for each thread (the current GPU and streams, cuBLAS's handle and
workspace) is separate. Python schedules the threads as in a run on a real GPU.

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
from memprof.virtual.device_state import OperatorLock
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
        """Yield patches of the start and the body of every thread."""
        start, bootstrap = threading.Thread.start, "_bootstrap_inner"
        original = getattr(threading.Thread, bootstrap)

        def start_and_note(thread: threading.Thread) -> None:
            target = getattr(thread, "_target", None)
            is_of_queue = getattr(target, "__module__", "") == "multiprocessing.queues"  # thread that writes a queue
            if is_of_program(sys._getframe(1)) and not is_of_queue:
                self._simulated.add(thread)
            start(thread)

        def run(thread: threading.Thread) -> None:
            with self._enter_modes(context) if thread in self._simulated else contextlib.nullcontext():
                original(thread)

        start_and_note.__name__ = start_and_note.__qualname__ = start.__name__
        yield threading.Thread, "start", start_and_note
        yield threading.Thread, bootstrap, run

    @contextlib.contextmanager
    def _enter_modes(self, context: InstallContext) -> Iterator[None]:
        dispatch_mode = copy.copy(context.dispatch_mode)
        dispatch.TorchDispatchMode.__init__(dispatch_mode)  # a mode's record of its outer modes belongs to the thread
        with dispatch_mode.recorder.writer.lock:
            # A cuBLAS handle passes to the next thread when its own thread has ended (CublasHandlePool.cpp).
            number = next(one for one in itertools.count(1) if one not in self._numbers)
            self._numbers.add(number)
        writer = dispatch_mode.recorder.writer
        dispatch_mode.operator_lock = OperatorLock(writer, f"thread {number}", lambda: context.assume(_ORDER))
        writer.mark_worker_thread()
        dispatch_mode.function_mode = context.function_mode.make_thread_mode(dispatch_mode)
        with dispatch_mode.function_mode:
            dispatch.push_dispatch_mode(dispatch_mode)
            try:
                yield
            finally:
                dispatch.pop_dispatch_mode()
                self._numbers.discard(number)


def is_of_program(frame: FrameType | None) -> bool:
    """Return whether the program or one of its libraries starts the thread, and not torch or memprof."""
    while frame is not None and frame.f_code.co_filename.startswith((_STDLIB, _HERE, "<frozen")):
        if "-packages" in frame.f_code.co_filename:
            break
        frame = frame.f_back
    name = "" if frame is None else frame.f_code.co_filename
    return is_program_file(name)
