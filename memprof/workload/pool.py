"""The one way in which memprof works in parallel: worker processes, as an executor of the standard library.

A simulated run uses one core. `WorkerPool` has the workers: those of a sweep, whose cells are sent to them, and those
of `run_all`, which have its tasks from the fork. Processes that talk to each other (virtual ranks), and programs that
are to know nothing of this process, are started elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from memprof.device.host import available_bytes
from memprof.errors import MemprofError, UsageError

ENV_VARIABLE = "MEMPROF_PROCESSES"  # maximum number of workers; 1: tasks run in this process
# Free host memory that each worker needs: a run of a 9B model takes about 0.4 GiB of unshared memory.
BYTES_PER_WORKER = 1 << 30
_PR_SET_PDEATHSIG = 1

_loaded_by_workers: set[str] = set()
_inherited_tasks: Sequence[Callable[[], Any]] = ()  # in a worker

_Result = TypeVar("_Result")


def count_workers() -> int:
    """Return the number of parallel workers; 1 in a worker process, and where a fork is not possible.

    Forks are used on Linux only, because elsewhere threads of libraries do not survive, and only where torch sees no
    GPU (`track_bad_autograd_forks`, torch/csrc/autograd/engine.cpp). Raises UsageError if MEMPROF_PROCESSES is invalid.
    """
    limit = os.environ.get(ENV_VARIABLE, "").strip()
    if limit and (not limit.isdecimal() or int(limit) < 1):
        raise UsageError(f"{ENV_VARIABLE} is no number of processes", value=limit, hint="1, 2, ...; or leave it unset")
    if sys.platform != "linux" or multiprocessing.parent_process() is not None or torch.cuda.device_count():
        return 1
    max_workers = int(limit) if limit else len(os.sched_getaffinity(0))
    free_bytes = available_bytes()
    return max(1, max_workers if free_bytes is None else min(max_workers, free_bytes // BYTES_PER_WORKER))


def run_all(
    tasks: Sequence[Callable[[], _Result]], progress: Callable[[str], None] = lambda doing: None
) -> list[_Result | MemprofError]:
    """Return the result of each of `tasks`, or the MemprofError that the task raises, in the order of `tasks`.

    Results must be picklable. Tasks run in worker processes, and their side effects stay there; with fewer than two
    workers, in this process. The tasks that a killed worker leaves behind are run again one at a time, and one whose
    worker is killed again has a MemprofError. `progress` gets messages from "0 of 8 done" on.
    """
    max_workers = min(count_workers(), len(tasks))
    if max_workers < 2:
        return [_run_task(task) for task in tasks]
    results: dict[int, Any] = {}

    def take(future: Future[Any], index: int) -> None:
        results[index], files = future.result()
        _loaded_by_workers.update(files)
        progress(f"{len(results)} of {len(tasks)} done")

    pool = WorkerPool(max_workers, tasks)
    try:
        progress(f"0 of {len(tasks)} done")
        futures = {pool.executor.submit(_run_inherited, index): index for index in range(len(tasks))}
        for future in as_completed(futures):
            with contextlib.suppress(BrokenProcessPool):  # the end of one worker is that of all
                take(future, futures[future])
        for index in sorted({*futures.values()} - results.keys()):
            try:
                take(pool.restart().submit(_run_inherited, index), index)
            except BrokenProcessPool:
                hint = f"the kernel kills processes when host memory runs out: free some, or set {ENV_VARIABLE}=1"
                results[index] = MemprofError("a worker process ended without a result, twice", hint=hint)
    finally:
        pool.kill()
    return [results[index] for index in range(len(tasks))]


def run_all_or_raise(
    tasks: Sequence[Callable[[], _Result]], progress: Callable[[str], None] = lambda doing: None
) -> list[_Result]:
    """Return the results of `run_all`; raise the first MemprofError among them."""
    results: list[Any] = run_all(tasks, progress)
    for result in results:
        if isinstance(result, MemprofError):
            raise result
    return results


class WorkerPool:
    """Worker processes as an executor: forked with all imports of this process where a fork is possible, else started
    anew. `tasks` are those of `_run_inherited`: a fork has them without pickling."""

    def __init__(self, num_workers: int, tasks: Sequence[Callable[[], Any]] = ()) -> None:
        self.num_workers = num_workers
        self._tasks = tasks
        self._earlier = set(multiprocessing.active_children())
        self.executor = self._start()

    def _start(self) -> ProcessPoolExecutor:
        can_fork = sys.platform == "linux" and not torch.cuda.device_count()
        context = multiprocessing.get_context("fork" if can_fork else "spawn")
        executor = ProcessPoolExecutor(
            self.num_workers, mp_context=context, initializer=_prepare_worker, initargs=(self._tasks,)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, where there is a thread for progress
            executor.submit(int)  # forks all workers
        return executor

    def restart(self) -> ProcessPoolExecutor:
        """Replace the executor, which is broken if one of its processes was killed, by a new one; return it."""
        self.kill()
        self.executor = self._start()
        return self.executor

    def kill(self) -> None:
        """End the workers at once, with the processes that they have started."""
        self.executor.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - self._earlier:
            if sys.platform != "win32" and process.pid is not None:
                with contextlib.suppress(OSError):  # it leads no group yet
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def loaded_module_files() -> set[str]:
    """Return the files of all modules that this process and its finished workers have loaded."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return _loaded_by_workers.union(file for file in files if isinstance(file, str))


def _prepare_worker(tasks: Sequence[Callable[[], Any]]) -> None:
    """Prepare a worker: it ends with its parent, and leads a process group, which Ctrl-C in a terminal does not
    reach."""
    global _inherited_tasks
    _inherited_tasks = tasks
    if sys.platform != "win32":
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)  # a pool of threads is not inherited
    gc.freeze()  # what the fork has inherited is not traversed after each task


def _run_inherited(index: int) -> tuple[Any, set[str]]:
    """Return the result of a task that this worker has from its fork, and the files that are new to it."""
    files_before = loaded_module_files()
    result = _run_task(_inherited_tasks[index])
    gc.collect()  # reference cycles of the task
    gc.freeze()
    return result, loaded_module_files() - files_before


def _run_task(task: Callable[[], _Result]) -> _Result | MemprofError:
    try:
        return task()
    except MemprofError as error:
        error.__traceback__ = None  # its frames would keep the model
        return error
