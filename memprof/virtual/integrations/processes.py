"""Other processes: the virtual GPU belongs to the process that entered it.

A forked child inherits the modes and the patches, and a copy of the recorder that nobody reads: the virtual GPU is
disabled in the child before the child's own code runs. A child that is started anew has none: see subprocesses.py. Both
kinds of child see `torch.cuda.is_available()`, and the first use of the GPU is an error that names the source line.
Children that do not use CUDA (tokenizing, decoding) run normally.
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
from memprof.virtual.distributed import process_groups
from memprof.virtual.install_context import InstallContext
from memprof.virtual.limits import (
    SEND_NUMBERS_HINT,
    invalid_on_cuda_error,
    set_unsupported_handler,
    unsupported_error,
)

_SPAWN_INLINE = "torch.multiprocessing.spawn with one process: its function runs in this process."
_SPAWN_ONE = "torch.multiprocessing.spawn with {} processes: the function of one of them runs, in this process."
_READ_AHEAD = frozenset({"transformers.core_model_loading"})  # modules whose threads make tensors on the GPU
_in_child: list[Callable[[], None]] = []  # called in a forked child


@functools.cache
def _watch_forks() -> None:
    """Register the calls of `_in_child` in every forked child: permanent, and without an active GPU no effect."""
    os.register_at_fork(after_in_child=lambda: [leave() for leave in _in_child])


def _disable_in_child(context: InstallContext) -> None:
    """Disable the modes in a forked child; they stay on their stacks, where running code expects them."""
    context.leave_in_child()
    context.function_mode.is_off = context.dispatch_mode.is_off = True
    file = context.subprocesses.file
    set_unsupported_handler(lambda problem, hint, line: no_gpu.report_refusal(file, problem, hint))
    no_gpu.refuse(torch.cuda, file, lambda problem: MemprofError(problem, hint=no_gpu.HINT))


class Processes(Extension):
    """Starts of processes, and queues between processes."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of queues between processes, and of functions that start a rank for each GPU."""
        for queue in (multiprocessing.queues.Queue, multiprocessing.queues.SimpleQueue):
            yield queue, "put", _wrap_put(queue.put, context.dispatch_mode.is_virtual)
        pool = concurrent.futures.ThreadPoolExecutor
        yield pool, "submit", _wrap_submit(pool.submit)
        for name in ("spawn", "start_processes"):
            yield torch.multiprocessing, name, _wrap_spawn(getattr(torch.multiprocessing, name), context)
        yield from context.subprocesses.patches()

    @contextlib.contextmanager
    def around(self, context: InstallContext) -> Iterator[None]:
        """Context manager: give started Python processes the probe, and disable the virtual GPU in forked processes.

        Unsupported operations are noted, since a program may catch the error and go on without the GPU.
        """
        _watch_forks()
        _in_child.append(functools.partial(_disable_in_child, context))
        set_unsupported_handler(context.on_unsupported)
        try:
            with context.subprocesses:
                yield
        finally:
            _in_child.pop()
            set_unsupported_handler(None)


def _wrap_put(original: Callable[..., Any], is_virtual: Callable[[torch.Tensor], bool]) -> Callable[..., Any]:
    """Return a `put` that raises for virtual tensors: the queue's own thread, which pickles, would lose the error."""

    def put(queue: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(part, torch.Tensor) and is_virtual(part) for part in tree_leaves(obj)):
            raise unsupported_error(
                "sends another process a tensor of the virtual GPU, which has no data", SEND_NUMBERS_HINT
            )
        original(queue, obj, *args, **kwargs)

    return put


def _wrap_submit(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `submit` that runs jobs of libraries' prefetching threads at once, in a fixed order: all tensors are
    then read before the first is converted, as far ahead as threads can get."""

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
    """Return `torch.multiprocessing.spawn` for at most as many processes as GPUs: the run simulates one of them."""
    assume, dispatch_mode, gpus = context.assume, context.dispatch_mode, context.gpus.num_gpus
    is_exact = context.channel is not None  # all of them run, and the program may not start fewer

    def spawn(
        fn: Callable[..., Any], args: Any = (), nprocs: int = 1, join: bool = True, *rest: Any, **options: Any
    ) -> Any:
        if is_exact and nprocs not in (1, gpus):
            raise invalid_on_cuda_error(
                f"starts {nprocs} processes, where {gpus} ranks run together",
                f"ask for as many GPUs as it starts processes: --gpus {nprocs}",
            )
        if nprocs > gpus:
            try:
                return original(fn, args, nprocs, join, *rest, **options)
            except (ProcessException, MemprofError) as error:
                problem = error.problem if isinstance(error, MemprofError) else str(error).strip().splitlines()[-1]
                raise invalid_on_cuda_error(
                    f"starts {nprocs} processes where there are GPUs for {gpus}, and one failed: {problem}",
                    f"if each takes a GPU: memprof run --gpus {nprocs}",
                ) from error
        if not is_exact:
            assume(_SPAWN_INLINE if nprocs == 1 else _SPAWN_ONE.format(nprocs))
        first_storage = len(dispatch_mode.recorder.trace.storages)
        with process_groups.destroy_groups_at_end():
            fn(context.options.rank % nprocs, *args)
        # The next rank is a process of its own.
        gc.collect()
        dispatch_mode.free_process_memory(first_storage)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        # Else the context of a process that has ended.
        return None if join else SimpleNamespace(processes=(), join=lambda *args, **options: True, pids=list)

    return spawn
