"""Work in forked workers: the same answers, in their order, and nobody is left behind."""

import functools
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from memprof.device import host
from memprof.errors import MemprofError, UsageError
from memprof.workload import pool
from memprof.workload.pool import count_workers, loaded_module_files, run_all

HERE = os.getpid()


@pytest.fixture(autouse=True)
def two(monkeypatch):
    monkeypatch.setenv("MEMPROF_PROCESSES", "2")


def children() -> str:
    """Of this thread, by their numbers."""
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()


def here(number: int) -> tuple[int, bool]:
    return number, os.getpid() == HERE


def fails(number: int) -> int:
    raise UsageError("no such number", value=number, hint="take another")


def dies(number: int) -> tuple[int, bool]:
    if os.getpid() != HERE:
        os.kill(os.getpid(), signal.SIGKILL)
    return here(number)


def trained(width: int) -> float:
    """Parallel sums and a backward pass: what does not outlive a fork if it is not seen to."""
    weight = torch.ones(width, width, requires_grad=True)
    (weight @ torch.ones(width, width)).sum().backward()
    assert weight.grad is not None
    return weight.grad.sum().item()


def test_answers_come_in_order_from_other_processes():
    said, before = [], children()  # those of other tests
    answers = run_all([functools.partial(here, number) for number in range(5)], said.append)
    assert answers == [(number, False) for number in range(5)]
    assert said[0] == "0 of 5 done" and said[-1] == "5 of 5 done"
    assert children() == before


def test_a_worker_may_start_processes():
    """As a program's loader of data does."""

    def starts() -> tuple[int | None, bool]:
        started = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,))
        started.start()
        started.join()
        return started.exitcode, os.getpid() == HERE

    assert run_all([starts, starts]) == [(0, False)] * 2


def test_errors_for_the_user_come_back_in_their_place():
    first, error, last = run_all([functools.partial(here, 1), functools.partial(fails, 2), functools.partial(here, 3)])
    assert first == (1, False) and last == (3, False)
    assert isinstance(error, UsageError) and (error.problem, error.value) == ("no such number", 2)
    assert error.hint == "take another"


def test_a_killed_worker_costs_no_other_task_its_result():
    error, *others = run_all([functools.partial(dies, 1), *(functools.partial(here, number) for number in (2, 3, 4))])
    assert isinstance(error, MemprofError) and error.problem == "a worker process ended without a result, twice"
    assert others == [(2, False), (3, False), (4, False)]


def test_a_worker_that_is_killed_once_is_replaced(tmp_path):
    def dies_once(path: Path) -> bool:
        if not path.exists():
            path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid() == HERE

    (tmp_path / "here").touch()
    assert run_all([functools.partial(dies_once, tmp_path / name) for name in ("absent", "here")]) == [False, False]


def test_threads_and_backward_passes_go_on_in_a_fork():
    trained(300)
    assert run_all([functools.partial(trained, 300)] * 2) == [300.0**3] * 2


@pytest.mark.parametrize("why", ["asked", "memory", "gpu", "inside", "platform"])
def test_none_is_forked_where_that_is_not_safe(monkeypatch, why):
    if why == "asked":
        monkeypatch.setenv("MEMPROF_PROCESSES", "1")
    elif why == "memory":
        monkeypatch.setattr(pool, "available_bytes", lambda: 3 << 29)
    elif why == "gpu":
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    elif why == "inside":
        monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    else:
        monkeypatch.setattr(pool.sys, "platform", "darwin")
    assert count_workers() == 1
    assert run_all([functools.partial(here, number) for number in range(2)]) == [(0, True), (1, True)]


@pytest.mark.parametrize("asked", ["0", "-1", "abc", "1.5"])
def test_a_number_of_processes_is_one(monkeypatch, asked):
    monkeypatch.setenv("MEMPROF_PROCESSES", asked)
    with pytest.raises(UsageError, match="MEMPROF_PROCESSES is no number of processes"):
        count_workers()


def test_as_many_as_there_are_cores(monkeypatch):
    monkeypatch.delenv("MEMPROF_PROCESSES")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 5})
    assert count_workers() == min(3, max(1, (host.available_bytes() or 1 << 40) // pool.BYTES_PER_WORKER))


def test_an_interrupted_search_leaves_no_process(tmp_path):
    """What `progress` raises stands for Ctrl-C while others run."""

    def stop(doing: str) -> None:
        if doing.startswith("1 of"):
            raise KeyboardInterrupt

    def sleeps(path: Path) -> None:
        path.write_text(str(os.getpid()))
        time.sleep(60)

    def waits(path: Path) -> None:
        while not path.exists() or not path.read_text():
            time.sleep(0.01)

    path = tmp_path / "process"
    with pytest.raises(KeyboardInterrupt):
        run_all([functools.partial(sleeps, path), functools.partial(waits, path)], stop)
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)


def test_what_they_import_is_known_to_the_cache(tmp_path, monkeypatch):
    """An answer that they gave holds as long as those files are as they were."""
    (tmp_path / "loaded_in_a_fork.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(number: int) -> str:
        return importlib.import_module("loaded_in_a_fork").__name__ * number

    run_all([functools.partial(load, 1), functools.partial(load, 1)])
    assert "loaded_in_a_fork" not in sys.modules
    assert str(tmp_path / "loaded_in_a_fork.py") in loaded_module_files()


def test_an_error_of_ours_is_raised_here(capfd):
    def broken() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_all([broken, broken])
    assert capfd.readouterr() == ("", "")
