"""Threads that the program starts, which can use the virtual GPU like the main thread.

torch's modes belong to one thread, so each thread of the program enters modes of its own when it begins, and leaves
them when it ends. Shared state (the trace, the tensors' devices, the known values) is written under the recorder's
lock, by one operator at a time. State that CUDA has for each thread (the current GPU and streams, cuBLAS's handle and
workspace) is separate. Python schedules the threads as in a run on a real GPU.

Threads that torch, memprof or Python's multiprocessing start have no modes.
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
    """Patches by which each thread of the program enters modes of its own."""

    def __init__(self) -> None:
        self._program_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._thread_numbers: set[int] = set()

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of `Thread.start` and of the method that runs a thread's target."""
        start, bootstrap = threading.Thread.start, "_bootstrap_inner"
        original = getattr(threading.Thread, bootstrap)

        def start_and_register(thread: threading.Thread) -> None:
            target = getattr(thread, "_target", None)
            writes_queue = getattr(target, "__module__", "") == "multiprocessing.queues"  # thread that writes a queue
            if is_started_by_program(sys._getframe(1)) and not writes_queue:
                self._program_threads.add(thread)
            start(thread)

        def run(thread: threading.Thread) -> None:
            with self._enter_modes(context) if thread in self._program_threads else contextlib.nullcontext():
                original(thread)

        start_and_register.__name__ = start_and_register.__qualname__ = start.__name__
        yield threading.Thread, "start", start_and_register
        yield threading.Thread, bootstrap, run

    @contextlib.contextmanager
    def _enter_modes(self, context: InstallContext) -> Iterator[None]:
        dispatch_mode = copy.copy(context.dispatch_mode)
        dispatch.TorchDispatchMode.__init__(dispatch_mode)  # a mode's record of its outer modes belongs to the thread
        with dispatch_mode.recorder.writer.lock:
            # A cuBLAS handle passes to the next thread when its own thread has ended (CublasHandlePool.cpp).
            number = next(n for n in itertools.count(1) if n not in self._thread_numbers)
            self._thread_numbers.add(number)
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
                self._thread_numbers.discard(number)


def is_started_by_program(frame: FrameType | None) -> bool:
    """Return whether `frame`, which starts a thread, is of the program or its libraries, not of torch or memprof."""
    while frame is not None and frame.f_code.co_filename.startswith((_STDLIB, _HERE, "<frozen")):
        if "-packages" in frame.f_code.co_filename:
            break
        frame = frame.f_back
    path = "" if frame is None else frame.f_code.co_filename
    return is_program_file(path)
