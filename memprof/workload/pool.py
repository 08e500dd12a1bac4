"""Pool of forked workers for independent tasks.

A simulated run uses one core. Independent runs of a search run in parallel: each worker is forked with all imports of
this process, and sends back the task's result or error. A task whose worker ends without an answer (out of memory) is
run again in this process, so that the answers do not depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, TypeVar, cast

import torch

from memprof.device.host import available_bytes
from memprof.errors import MemprofError, UsageError

ENV_VARIABLE = "MEMPROF_PROCESSES"  # maximum number of workers; 1: tasks run in this process
# Free host memory that each worker needs: a run of a 9B model takes about 0.4 GiB of unshared memory.
BYTES_PER_WORKER = 1 << 30
_PR_SET_PDEATHSIG = 1

_loaded_by_workers: set[str] = set()

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

    Results must be picklable. A task runs in a worker process, or in this one if the worker ends without a result;
    other side effects stay in that process. `progress` gets messages from "0 of 8 done" on.
    """
    max_workers = min(count_workers(), len(tasks))
    if max_workers < 2:
        return [_run_task(task) for task in tasks]
    results: dict[int, Any] = {}
    running: dict[Connection, tuple[int, Any]] = {}
    pending = list(enumerate(tasks))
    progress(f"0 of {len(tasks)} done")
    try:
        while pending or running:
            while pending and len(running) < max_workers:
                index, task = pending.pop(0)
                connection, worker = _start_worker(task)
                running[connection] = index, worker
            for connection in cast(list[Connection], wait([*running])):
                index, worker = running.pop(connection)
                with connection, contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
                    results[index], files = connection.recv()
                    _loaded_by_workers.update(files)
                worker.join()
                progress(f"{len(tasks) - len(pending) - len(running)} of {len(tasks)} done")
    finally:
        for connection, (_, worker) in running.items():
            worker.kill()
            worker.join()
            connection.close()
    return [results[index] if index in results else _run_task(task) for index, task in enumerate(tasks)]


class WorkerPool:
    """Worker processes for tasks that can be pickled, as an executor: forked with all imports of this process where a
    fork is possible, else started anew."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._earlier = set(multiprocessing.active_children())
        self.executor = self._start()

    def _start(self) -> ProcessPoolExecutor:
        can_fork = sys.platform == "linux" and not torch.cuda.device_count()
        context = multiprocessing.get_context("fork" if can_fork else "spawn")
        return ProcessPoolExecutor(self.num_workers, mp_context=context, initializer=_prepare_pool_worker)

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


def _start_worker(task: Callable[[], Any]) -> tuple[Connection, Any]:
    receiver, sender = Pipe(duplex=False)
    worker = multiprocessing.get_context("fork").Process(target=_run_worker, args=(task, sender))
    with sender, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, where there is a thread for progress
        worker.start()
    return receiver, worker


def _run_worker(task: Callable[[], Any], connection: Connection) -> None:
    """Run `task` in a forked worker and send its result; the worker ends with its parent, and silently on Ctrl-C."""
    _prepare_worker()
    files_before = loaded_module_files()
    with contextlib.suppress(Exception):  # the work is done again, and raises it, in the process that requested it
        connection.send((_run_task(task), loaded_module_files() - files_before))


def _prepare_pool_worker() -> None:
    """Prepare a worker of a pool; it leads a process group, which Ctrl-C in a terminal does not reach."""
    if sys.platform != "win32":
        os.setpgid(0, 0)
    _prepare_worker()


def _prepare_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)  # a pool of threads is not inherited


def _run_task(task: Callable[[], _Result]) -> _Result | MemprofError:
    try:
        return task()
    except MemprofError as error:
        error.__traceback__ = None  # its frames would keep the model
        return error
