"""Independent pieces of work at once, each in a process that is forked from this one.

A simulated run takes one core. Those of a search that do not wait for each other are run side by side: this process has
imported torch and the libraries, the others begin with all that it has, and what comes back is what the work returned
or raised. A process that dies without an answer (the system was out of memory) has its work done again here, so that
the answers are the same however many there are.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn, TypeVar, cast

import torch

from memprof.cache.inputs import files_of_modules, note_files
from memprof.device.host import available_bytes
from memprof.errors import MemprofError

VARIABLE = "MEMPROF_PROCESSES"
"""At most so many at once; 1: none is forked."""
PROCESS_BYTES = 1 << 30
"""Of host memory that has to be free for each: a run of a model of 9B takes about 0.4 GiB beside what it shares."""
_PR_SET_PDEATHSIG = 1
_inside = False
"""Whether this is one of them: they fork no others."""

_Answer = TypeVar("_Answer")


def number_of_processes() -> int:
    """How many may run at once; 1 where none can be forked.

    On Linux alone: elsewhere the libraries' own threads do not outlive a fork. Nor do those of autograd where torch
    sees a card (`track_bad_autograd_forks`, torch/csrc/autograd/engine.cpp).
    """
    return 1 if _inside else _most()


def may_fork() -> bool:
    """Whether this process, also if it is one of several, may be forked for what it then waits for."""
    return _most() > 1


def _most() -> int:
    if sys.platform != "linux" or torch.cuda.device_count():
        return 1
    asked = os.environ.get(VARIABLE, "")
    most = int(asked) if asked.isdigit() else len(os.sched_getaffinity(0))
    free = available_bytes()
    return max(1, most if free is None else min(most, free // PROCESS_BYTES))


def side_by_side(
    works: Sequence[Callable[[], _Answer]],
    progress: Callable[[str], None] = lambda doing: None,
    long: Collection[int] = (),
) -> list[_Answer | MemprofError]:
    """What each of `works` returns, or the MemprofError that it raises, in their order.

    Args:
        works: what they return can be pickled; what they change is changed in their own process alone, or, where they
            run here after all, in this one.
        progress: told how many are done.
        long: which take longest and are begun first, so that at the end no core waits for one of them.
    """
    most = min(number_of_processes(), len(works))
    if most < 2:
        return [tried(work) for work in works]
    answers: dict[int, Any] = {}
    running: dict[Connection, tuple[int, int]] = {}
    left = sorted(enumerate(works), key=lambda work: work[0] not in long)
    try:
        while left or running:
            while left and len(running) < most:
                place, work = left.pop(0)
                line, pid = _forked(work, [*running])
                running[line] = place, pid
            for line in cast(list[Connection], wait([*running])):
                place, pid = running[line]
                with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
                    answers[place], files = line.recv()
                    note_files(files)
                del running[line]
                line.close()
                os.waitpid(pid, 0)
                progress(f"{len(works) - len(left) - len(running)} of {len(works)} done")
    finally:
        for line, (_, pid) in running.items():
            line.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [answers[place] if place in answers else tried(work) for place, work in enumerate(works)]


def while_elsewhere(work: Callable[[], _Answer], here: Callable[[], object]) -> _Answer | MemprofError:
    """What `work` returns, in another process, or the MemprofError that it raises; meanwhile this one does `here`."""
    line, pid = _forked(work, [])
    try:
        here()
        answer, files = line.recv()
        note_files(files)
    except (EOFError, OSError, pickle.UnpicklingError):
        return tried(work)
    finally:
        line.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    found: _Answer | MemprofError = answer
    return found


def tried(work: Callable[[], _Answer]) -> _Answer | MemprofError:
    """What it returns, or the MemprofError that it raises."""
    try:
        return work()
    except MemprofError as error:
        error.__traceback__ = None  # its frames would keep the model
        return error


def _forked(work: Callable[[], Any], others: Sequence[Connection]) -> tuple[Connection, int]:
    ours, theirs = Pipe(duplex=False)
    pid = fork()
    if pid == 0:
        for line in (ours, *others):
            line.close()
        _be(work, theirs)
    theirs.close()
    return ours, pid


def fork() -> int:
    """As os.fork, with nothing written twice."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, where there is a thread for progress
        return os.fork()


def settle() -> None:
    """In a process that was forked: it ends with the one that it comes from, and forks no others at once."""
    global _inside
    _inside = True
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)  # a pool of threads is not inherited


def _be(work: Callable[[], Any], line: Connection) -> NoReturn:
    """One of the processes: it ends here, whatever happens, and runs nothing of what this one does at its end."""
    try:
        settle()
        before = files_of_modules()
        answer = tried(work)
        line.send((answer, files_of_modules() - before))
        line.close()
    finally:
        os._exit(0)
