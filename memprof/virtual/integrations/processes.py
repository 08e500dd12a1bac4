"""Other processes: the virtual GPU belongs to the process that entered it.

A forked child inherits the modes and the patches, and a copy of the recorder that nobody reads: there the virtual GPU
is switched off before the child's own code runs. A child that is started anew has none: see subprocesses.py. In both
the program is told that there is a GPU, as it would be, and the first use of it is an error that names the line.
Children that leave CUDA alone (tokenizing, decoding) are none the wiser.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import gc
import multiprocessing.queues
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessException

from memprof.errors import MemprofError
from memprof.monitor.probe import no_gpu
from memprof.patching import Extension, Patch
from memprof.torch_private import dispatch
from memprof.torch_private.pytree import tree_leaves
from memprof.virtual.distributed import joining
from memprof.virtual.install_context import InstallContext
from memprof.virtual.limits import (
    SEND_NUMBERS,
    invalid_on_cuda_error,
    set_unsupported_handler,
    unsupported_error,
)

_SPAWN_INLINE = "torch.multiprocessing.spawn with one process: its function runs in this process."
_SPAWN_ONE = "torch.multiprocessing.spawn with {} processes: the function of one of them runs, in this process."
_READ_AHEAD = frozenset({"transformers.core_model_loading"})  # modules whose jobs for threads make tensors on the GPU
_in_child: list[Callable[[], None]] = []  # called in a child that is forked


@functools.cache
def _watch_forks() -> None:
    """Have `_in_child` called in every child; that cannot be taken back, and without an active GPU it does nothing."""
    os.register_at_fork(after_in_child=lambda: [leave() for leave in _in_child])


def _disable_in_child(context: InstallContext) -> None:
    """Disable the modes in a forked child: they stay on their stacks, where running code expects them."""
    context.leave_in_child()
    context.function_mode.is_off = context.tracker.is_off = True
    file = context.children.file
    set_unsupported_handler(lambda problem, hint, line: no_gpu.report_refusal(file, problem, hint))
    no_gpu.refuse(torch.cuda, file, lambda problem: MemprofError(problem, hint=no_gpu.HINT))


class Processes(Extension):
    """Starts of processes, and queues between them."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Replace queues between processes, and what starts a rank for each GPU."""
        for queue in (multiprocessing.queues.Queue, multiprocessing.queues.SimpleQueue):
            yield queue, "put", _wrap_put(queue.put, context.tracker.is_virtual)
        pool = concurrent.futures.ThreadPoolExecutor
        yield pool, "submit", _wrap_submit(pool.submit)
        for name in ("spawn", "start_processes"):
            yield torch.multiprocessing, name, _wrap_spawn(getattr(torch.multiprocessing, name), context)
        yield from context.children.patches()

    @contextlib.contextmanager
    def around(self, context: InstallContext) -> Iterator[None]:
        """Tell Pythons that are started what they do not have; switch the virtual GPU off in those that are forked.

        What is refused is noted: a program may catch the error and go on as on no GPU.
        """
        _watch_forks()
        _in_child.append(functools.partial(_disable_in_child, context))
        set_unsupported_handler(context.refused)
        try:
            with context.children:
                yield
        finally:
            _in_child.pop()
            set_unsupported_handler(None)


def _wrap_put(original: Callable[..., Any], is_virtual: Callable[[torch.Tensor], bool]) -> Callable[..., Any]:
    """A queue's own thread pickles what is put; there an error would be lost, and the other side would wait."""

    def put(queue: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(part, torch.Tensor) and is_virtual(part) for part in tree_leaves(obj)):
            raise unsupported_error(
                "sends another process a tensor of the virtual GPU, which has no data", SEND_NUMBERS
            )
        original(queue, obj, *args, **kwargs)

    return put


def _wrap_submit(original: Callable[..., Any]) -> Callable[..., Any]:
    """Threads of libraries that read weights ahead come in any order. What they do is done at once instead: all tensors
    are then read before the first is converted, which is as far ahead as threads can be."""

    def submit(pool: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if getattr(function, "__module__", None) not in _READ_AHEAD or not dispatch.len_torch_function_stack():
            return original(pool, function, *args, **kwargs)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    return submit


def _wrap_spawn(original: Callable[..., Any], context: InstallContext) -> Callable[..., Any]:
    """`torch.multiprocessing.spawn` of as many processes as there are GPUs, or fewer: this is one of them."""
    assume, tracker, gpus = context.assume, context.tracker, context.gpus.number
    exactly = context.channel is not None  # all of them run, and the program may not start fewer

    def spawn(
        fn: Callable[..., Any], args: Any = (), nprocs: int = 1, join: bool = True, *rest: Any, **options: Any
    ) -> Any:
        if exactly and nprocs not in (1, gpus):
            raise invalid_on_cuda_error(
                f"starts {nprocs} processes, where {gpus} ranks run together",
                f"ask for as many GPUs as it starts processes: --gpus {nprocs}",
            )
        if nprocs > gpus:
            try:
                return original(fn, args, nprocs, join, *rest, **options)
            except (ProcessException, MemprofError) as error:
                said = error.problem if isinstance(error, MemprofError) else str(error).strip().splitlines()[-1]
                raise invalid_on_cuda_error(
                    f"starts {nprocs} processes where there are GPUs for {gpus}, and one failed: {said}",
                    f"if each takes a GPU: memprof run --gpus {nprocs}",
                ) from error
        if not exactly:
            assume(_SPAWN_INLINE if nprocs == 1 else _SPAWN_ONE.format(nprocs))
        first = len(tracker.recorder.trace.storages)
        with joining.groups_end_with_the_run():
            fn(context.options.rank % nprocs, *args)
        # The next one is a process of its own.
        gc.collect()
        tracker.process_ended(first)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        # Else the context of a process that has ended.
        return None if join else SimpleNamespace(processes=(), join=lambda *args, **options: True, pids=list)

    return spawn
