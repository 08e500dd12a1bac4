"""Child processes: the virtual GPU belongs to the process that entered it.

A forked child inherits the modes and the patches, and a copy of the recorder that nobody reads: the virtual GPU is
disabled in the child before the child's own code runs. A spawned child has no virtual GPU: see subprocesses.py. In both
kinds of child `torch.cuda.is_available()` is true, and the first use of the GPU is an error that names the source line.
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
from memprof.virtual.gpu_functions import GpuFunctions
from memprof.virtual.install_context import InstallContext
from memprof.virtual.limits import (
    SEND_NUMBERS_HINT,
    invalid_on_cuda_error,
    set_unsupported_handler,
    unsupported_error,
)

_SPAWN_INLINE = "torch.multiprocessing.spawn with one process: its function runs in this process."
_SPAWN_ONE = "torch.multiprocessing.spawn with {} processes: the function of one of them runs, in this process."
_PREFETCHING_MODULES = frozenset({"transformers.core_model_loading"})  # modules whose threads make tensors on the GPU
_child_callbacks: list[Callable[[], None]] = []  # called in a forked child


@functools.cache
def _register_fork_callback() -> None:
    """Make every forked child call `_child_callbacks`; permanent, and without effect while the list is empty."""
    os.register_at_fork(after_in_child=lambda: [callback() for callback in _child_callbacks])


def _disable_in_child(context: InstallContext) -> None:
    """Disable the virtual GPU in a forked child. The modes stay on torch's stacks, where running code expects them."""
    context.leave_in_child()
    context.function_mode.is_off = context.dispatch_mode.is_off = True
    file = context.subprocesses.file
    set_unsupported_handler(lambda problem, hint, line: no_gpu.report_refusal(file, problem, hint))
    no_gpu.refuse(torch.cuda, file, lambda problem: MemprofError(problem, hint=no_gpu.HINT))


class Processes(Extension):
    """Patches of functions that start processes, and of queues between processes."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of queues, of prefetching thread pools, and of functions that start processes."""
        for queue_class in (multiprocessing.queues.Queue, multiprocessing.queues.SimpleQueue):
            yield queue_class, "put", _wrap_put(queue_class.put, context.dispatch_mode.is_virtual)
        executor = concurrent.futures.ThreadPoolExecutor
        yield executor, "submit", _wrap_submit(executor.submit)
        for name in ("spawn", "start_processes"):
            yield torch.multiprocessing, name, _wrap_spawn(getattr(torch.multiprocessing, name), context)
        yield from context.subprocesses.patches()

    @contextlib.contextmanager
    def around(self, context: InstallContext) -> Iterator[None]:
        """Context manager: install the probe in started Python processes, and disable the virtual GPU in forked ones.

        Unsupported operations are recorded, since a program may catch the error and go on without the GPU.
        """
        _register_fork_callback()
        _child_callbacks.append(functools.partial(_disable_in_child, context))
        set_unsupported_handler(context.on_unsupported)
        try:
            with context.subprocesses:
                yield
        finally:
            _child_callbacks.pop()
            set_unsupported_handler(None)


def _wrap_put(original: Callable[..., Any], is_virtual: Callable[[torch.Tensor], bool]) -> Callable[..., Any]:
    """Return a `put` that raises for virtual tensors here, and not later in the queue's thread, which pickles them."""

    def put(queue: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(leaf, torch.Tensor) and is_virtual(leaf) for leaf in tree_leaves(obj)):
            raise unsupported_error(
                "sends another process a tensor of the virtual GPU, which has no data", SEND_NUMBERS_HINT
            )
        original(queue, obj, *args, **kwargs)

    return put


def _wrap_submit(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `submit` that runs prefetching jobs of `_PREFETCHING_MODULES` at once: all tensors are then read before
    the first is converted, which is as far ahead as threads can get."""

    def submit(pool: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if getattr(function, "__module__", None) not in _PREFETCHING_MODULES or not dispatch.len_torch_function_stack():
            return original(pool, function, *args, **kwargs)
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    return submit


def _wrap_spawn(original: Callable[..., Any], context: InstallContext) -> Callable[..., Any]:
    """Return a `spawn` that runs the function of one process here; for more processes than GPUs, torch's runs."""
    assume, dispatch_mode, num_gpus = context.assume, context.dispatch_mode, context.gpus.num_gpus
    functions = GpuFunctions(context)
    runs_all_ranks = context.channel is not None  # all of them run, and the program may not start fewer

    def spawn(
        fn: Callable[..., Any], args: Any = (), nprocs: int = 1, join: bool = True, *rest: Any, **options: Any
    ) -> Any:
        if runs_all_ranks and nprocs not in (1, num_gpus):
            raise invalid_on_cuda_error(
                f"starts {nprocs} processes, where {num_gpus} ranks run together",
                f"ask for as many GPUs as it starts processes: --gpus {nprocs}",
            )
        if nprocs > num_gpus:
            try:
                return original(fn, args, nprocs, join, *rest, **options)
            except (ProcessException, MemprofError) as error:
                problem = error.problem if isinstance(error, MemprofError) else str(error).strip().splitlines()[-1]
                raise invalid_on_cuda_error(
                    f"starts {nprocs} processes where there are GPUs for {num_gpus}, and one failed: {problem}",
                    f"if each takes a GPU: memprof run --gpus {nprocs}",
                ) from error
        if not runs_all_ranks:
            assume(_SPAWN_INLINE if nprocs == 1 else _SPAWN_ONE.format(nprocs))
        first_storage = len(dispatch_mode.recorder.trace.storages)
        with process_groups.destroy_groups_at_end():
            fn(context.options.rank % nprocs, *args)
        # The next rank is a process of its own.
        gc.collect()
        dispatch_mode.free_process_memory(first_storage)
        functions.empty_cache()
        functions.reset_peak_memory_stats()
        # In place of torch's context of processes.
        return None if join else SimpleNamespace(processes=(), join=lambda *args, **options: True, pids=list)

    return spawn
