"""Where cells are answered: local processes, a dask cluster, or any executor of the caller."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from memprof.errors import MemprofError, UsageError
from memprof.fixes.catalog import check_package
from memprof.flows.profile import count_parallel_runs, preload_imports
from memprof.flows.sweep.questions import Question
from memprof.spec import TargetSpec

DASK_PREFIX = "dask:"
# Cells that an executor of the caller gets at once, of whose workers nothing is known.
_UNKNOWN_WIDTH = 256
_CONNECT_SECONDS = 15


@dataclass(slots=True)
class Workers:
    """An executor; the number of cells that it gets at once; and a function that replaces it once it is broken (None:
    it is not ours to replace)."""

    executor: Executor
    width: int
    restart: Callable[[], Executor] | None = None


def check_executor(executor: Executor | str | None) -> None:
    """Raise UsageError if `executor` is a name, and there is none of this name, or its package is not installed."""
    if not isinstance(executor, str):
        return
    if not executor.startswith(DASK_PREFIX) or executor == DASK_PREFIX:
        hint = f"give {DASK_PREFIX}tcp://HOST:8786; others with memprof.sweep(executor=...)"
        raise UsageError("no such executor", value=executor, hint=hint)
    check_package(f"--executor {DASK_PREFIX}ADDRESS", "distributed")


@contextlib.contextmanager
def open_workers(
    executor: Executor | str | None, questions: Sequence[Question], progress: Callable[[str], None], workers: int | None
) -> Iterator[Workers]:
    """Context manager: the workers of a sweep for `questions`; only our own are shut down.

    `executor` is None for local processes, `dask:ADDRESS` of a scheduler, or an executor. `workers` is how many cells
    it answers at once; None: as many as there are, as far as that is known. Raises MemprofError: there is no scheduler.
    """
    if isinstance(executor, str):
        with _connect(executor, workers) as connected:
            yield connected
    elif executor is not None:
        yield Workers(executor, workers or _UNKNOWN_WIDTH)
    else:
        with _open_local(questions, progress, workers) as local:
            yield local


@contextlib.contextmanager
def _open_local(
    questions: Sequence[Question], progress: Callable[[str], None], workers: int | None
) -> Iterator[Workers]:
    specs = [question.spec for question in questions if question.spec is not None]
    if specs:
        preload_imports(specs[0], progress)
        # The user's own code may depend on files of an earlier run.
        workers = workers or min(count_parallel_runs(spec) for spec in _select_models(specs))
    from memprof.workload.pool import WorkerPool  # needs torch

    pool = WorkerPool(min(workers or 1, len(questions)))
    try:
        yield Workers(pool.executor, pool.num_workers, pool.restart)
    finally:
        pool.kill()


def _select_models(specs: Sequence[TargetSpec]) -> Collection[TargetSpec]:
    """Return one of `specs` for each model."""
    return {spec.model: spec for spec in specs}.values()


@contextlib.contextmanager
def _connect(name: str, workers: int | None) -> Iterator[Workers]:
    from distributed import Client

    from memprof.flows.sweep.dask_profiler import ProfilerPause

    address = name.removeprefix(DASK_PREFIX)
    try:
        client = Client(address, timeout=_CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        hint = "is a scheduler there? `dask scheduler` starts one"
        raise MemprofError("the dask scheduler cannot be reached", value=f"{address} ({error})", hint=hint) from None
    with client:
        # Two for each thread: one is answered while the next is on its way.
        threads = sum(client.nthreads().values())
        executor = client.get_executor()
        client.register_plugin(ProfilerPause())
        try:
            yield Workers(executor, workers or max(2 * threads, 2))
        finally:
            executor.shutdown(wait=False)
            with contextlib.suppress(OSError, TimeoutError, ValueError):  # the scheduler may have ended
                client.unregister_worker_plugin(ProfilerPause.name)
