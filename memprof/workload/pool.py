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
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, TypeVar, cast

import torch

from memprof.device.host import available_bytes
from memprof.errors import MemprofError, UsageError

VARIABLE = "MEMPROF_PROCESSES"  # at most so many at once; 1: none is forked
# Of host memory that has to be free for each: a run of a model of 9B takes about 0.4 GiB beside what it shares.
PROCESS_BYTES = 1 << 30
_PR_SET_PDEATHSIG = 1

_loaded_by_workers: set[str] = set()

_Answer = TypeVar("_Answer")


def number_of_workers() -> int:
    """Return the number of parallel workers; 1 where a fork is not possible, and in a process that another started.

    On Linux only: elsewhere the libraries' own threads do not survive a fork. Nor do autograd's where torch sees a GPU
    (`track_bad_autograd_forks`, torch/csrc/autograd/engine.cpp). Raises UsageError for an invalid variable.
    """
    requested = os.environ.get(VARIABLE, "").strip()
    if requested and (not requested.isdecimal() or int(requested) < 1):
        raise UsageError(f"{VARIABLE} is no number of processes", value=requested, hint="1, 2, ...; or leave it unset")
    if sys.platform != "linux" or multiprocessing.parent_process() is not None or torch.cuda.device_count():
        return 1
    max_workers = int(requested) if requested else len(os.sched_getaffinity(0))
    free = available_bytes()
    return max(1, max_workers if free is None else min(max_workers, free // PROCESS_BYTES))


def run_all(
    works: Sequence[Callable[[], _Answer]], progress: Callable[[str], None] = lambda doing: None
) -> list[_Answer | MemprofError]:
    """Return what each of `works` returns, or the MemprofError that it raises, in their order.

    What they return can be pickled; what they change is changed in their own process alone, or, where they run here
    after all, in this one. `progress` is told how many are done.
    """
    max_workers = min(number_of_workers(), len(works))
    if max_workers < 2:
        return [_run_task(work) for work in works]
    answers: dict[int, Any] = {}
    running: dict[Connection, tuple[int, Any]] = {}
    left = list(enumerate(works))
    try:
        while left or running:
            while left and len(running) < max_workers:
                place, work = left.pop(0)
                line, worker = _start_worker(work)
                running[line] = place, worker
            for line in cast(list[Connection], wait([*running])):
                place, worker = running.pop(line)
                with line, contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
                    answers[place], files = line.recv()
                    _loaded_by_workers.update(files)
                worker.join()
                progress(f"{len(works) - len(left) - len(running)} of {len(works)} done")
    finally:
        for line, (_, worker) in running.items():
            worker.kill()
            worker.join()
            line.close()
    return [answers[place] if place in answers else _run_task(work) for place, work in enumerate(works)]


def loaded_module_files() -> set[str]:
    """Return the files of all modules that this process and its workers have loaded, as far as known."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return _loaded_by_workers.union(file for file in files if isinstance(file, str))


def _start_worker(work: Callable[[], Any]) -> tuple[Connection, Any]:
    receiver, sender = Pipe(duplex=False)
    worker = multiprocessing.get_context("fork").Process(target=_run_worker, args=(work, sender))
    with sender, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, where there is a thread for progress
        worker.start()
    return receiver, worker


def _run_worker(work: Callable[[], Any], line: Connection) -> None:
    """Run `work` in a worker, which ends with its parent process, and on Ctrl-C without a message."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)  # a pool of threads is not inherited
    before = loaded_module_files()
    with contextlib.suppress(Exception):  # the work is done again, and raises it, in the process that requested it
        line.send((_run_task(work), loaded_module_files() - before))


def _run_task(work: Callable[[], _Answer]) -> _Answer | MemprofError:
    try:
        return work()
    except MemprofError as error:
        error.__traceback__ = None  # its frames would keep the model
        return error
