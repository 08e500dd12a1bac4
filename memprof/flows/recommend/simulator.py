"""Simulated runs of many specs on one GPU. Each spec is run once; only the outcome is stored, not the trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from memprof.device.catalog import Gpu
from memprof.errors import MemprofError
from memprof.flows.profile import capture_trace, preload_imports
from memprof.flows.recommend.bisection import clamp_to_verdict, find_limit
from memprof.flows.recommend.outcome import SimulatedRun, evaluate_run
from memprof.report.documents.recommendation import LargestFit
from memprof.spec import TargetSpec
from memprof.watch.collection import freeze_existing_objects

Result = TypeVar("Result")
_OutcomeByRun = dict[tuple[TargetSpec, int], SimulatedRun]


class Simulator:
    """Simulator of specs on one GPU, with a cache of outcomes; `avoids_retries` goes to `evaluate_run`."""

    def __init__(self, gpu: Gpu, progress: Callable[[str], None], *, avoids_retries: bool = False) -> None:
        self.gpu = gpu
        self.progress = progress
        self.error_by_label: dict[str, str] = {}  # label of a failed run -> error
        self.last_error: MemprofError | None = None  # of the last failed run
        self._evaluate_run = functools.partial(evaluate_run, gpu=gpu, avoids_retries=avoids_retries)
        self._outcome_by_run: _OutcomeByRun = {}
        self._prefetched_runs: dict[tuple[TargetSpec, int], SimulatedRun | MemprofError] = {}  # not yet requested

    def __len__(self) -> int:
        """Return the number of runs requested so far."""
        return len(self._outcome_by_run)

    @property
    def usable_bytes(self) -> int:
        """Return the GPU's capacity less the CUDA context."""
        return self.gpu.total_bytes - self.gpu.context_bytes

    def fits_without_retries(self, outcome: SimulatedRun) -> bool:
        """Return whether a run fits without allocator retries."""
        return outcome.fits and outcome.needed_bytes <= self.gpu.total_bytes

    def make_sort_key(self, outcome: SimulatedRun) -> tuple[bool, bool, float]:
        """Return a sort key: runs with headroom first, then runs that fit with allocator retries, by step time."""
        return not outcome.fits, not self.fits_without_retries(outcome), outcome.seconds

    def run(self, spec: TargetSpec, label: str, micro_batches: int = 1) -> SimulatedRun:
        """Return the outcome of `spec` with `micro_batches` in a step; raise MemprofError if the run fails."""
        key = spec, micro_batches
        if key not in self._outcome_by_run:
            self.progress(f"run {len(self) + 1}: {label}")
            prefetched_run = self._prefetched_runs.pop(key, None)
            if isinstance(prefetched_run, MemprofError):
                raise prefetched_run
            self._outcome_by_run[key] = prefetched_run or self._run(spec, micro_batches)
        return self._outcome_by_run[key]

    def try_run(self, spec: TargetSpec, label: str, micro_batches: int = 1) -> SimulatedRun | None:
        """Return the outcome of `spec`; if the run fails, store the error in `error_by_label` and return None."""
        try:
            return self.run(spec, label, micro_batches)
        except MemprofError as error:
            self.error_by_label[label], self.last_error = error.line, error
            return None

    def preload_imports(self, spec: TargetSpec) -> None:
        """Import what runs like `spec` import, if there are workers to share it (see `flows.profile`)."""
        if _has_workers():
            preload_imports(spec, self.progress)

    def run_in_parallel(self, requests: Iterable[tuple[TargetSpec, int]]) -> None:
        """Run pairs of a spec and its number of micro-batches in parallel; `run` returns the outcomes later."""
        pending_runs = [
            key
            for key in dict.fromkeys(requests)
            if key not in self._outcome_by_run and key not in self._prefetched_runs
        ]
        if len(pending_runs) > 1 and _has_workers():
            from memprof.workload.pool import run_all

            tasks = [functools.partial(self._run, *key) for key in pending_runs]
            self._prefetched_runs |= zip(pending_runs, run_all(tasks, self._report("configurations")), strict=True)

    def run_searches(self, tasks: Sequence[Callable[[], Result]], work: str) -> list[Result]:
        """Run independent searches in parallel, each with a copy of this simulator; return their results in order.
        `work` says in progress lines what is searched."""
        if len(tasks) < 2 or not _has_workers():
            return [task() for task in tasks]
        from memprof.workload.pool import run_all_or_raise

        def search(task: Callable[[], Result]) -> tuple[Result, _OutcomeByRun, dict[str, str], MemprofError | None]:
            """Run `task` in a worker process; return its result, and the outcomes and errors of its runs."""
            self.last_error = None  # of the worker's task before
            return task(), self._outcome_by_run, self.error_by_label, self.last_error

        results = []
        searches = [functools.partial(search, task) for task in tasks]
        for result, outcomes, errors, last_error in run_all_or_raise(searches, self._report(work)):
            self._outcome_by_run |= outcomes
            self.error_by_label |= errors
            self.last_error = last_error or self.last_error
            results.append(result)
        return results

    def _report(self, work: str) -> Callable[[str], None]:
        """Return a function that reports how much of `work` is done."""
        return lambda done: self.progress(f"{work}: {done}")

    def find_run_limit(
        self,
        make_spec: Callable[[int], TargetSpec],
        format_label: Callable[[int], str],
        micro_batches: int = 1,
        *,
        start: int,
        high: int,
        step_size: int = 1,
        estimate: int | None = None,
    ) -> LargestFit:
        """Return the largest number for which the run of `make_spec(number)` fits, and the next (see `find_limit`)."""
        available_bytes = self.gpu.total_bytes

        def compute_bytes(number: int) -> int:
            outcome = self.run(make_spec(number), format_label(number), micro_batches)
            return clamp_to_verdict(outcome.needed_bytes, available_bytes, fits=outcome.fits)

        return find_limit(
            compute_bytes, available_bytes, low=1, high=high, step_size=step_size, start=start, estimate=estimate
        )

    def _run(self, spec: TargetSpec, micro_batches: int) -> SimulatedRun:
        outcome = self._evaluate_run(capture_trace(spec), spec, micro_batches)
        freeze_existing_objects()  # collects reference cycles of the run
        return outcome


def _has_workers() -> bool:
    from memprof.workload.pool import count_workers  # needs torch

    return count_workers() > 1
