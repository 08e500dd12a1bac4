"""Simulated runs of many specs on one GPU. Each spec is run once; only the outcome is stored, not the trace."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from memprof.device.catalog import Gpu
from memprof.errors import MemprofError
from memprof.flows.profile import capture_trace, profile
from memprof.flows.recommend.bisection import clamp_to_verdict, find_limit
from memprof.flows.recommend.outcome import SimulatedRun, evaluate_run
from memprof.report.documents.recommendation import LargestFit
from memprof.spec import TargetSpec
from memprof.watch.collection import freeze_existing_objects

Result = TypeVar("Result")
_OutcomeByRun = dict[tuple[TargetSpec, int], SimulatedRun]


class Simulator:
    """Simulator of specs on one GPU with a cache of outcomes; `avoids_retries` as in `evaluate_run`."""

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
            ready = self._prefetched_runs.pop(key, None)
            if isinstance(ready, MemprofError):
                raise ready
            self._outcome_by_run[key] = ready or self._run(spec, micro_batches)
        return self._outcome_by_run[key]

    def try_run(self, spec: TargetSpec, label: str, micro_batches: int = 1) -> SimulatedRun | None:
        """Return the outcome of `spec`; None if the run fails, with the error in `failures`."""
        try:
            return self.run(spec, label, micro_batches)
        except MemprofError as error:
            self.error_by_label[label], self.last_error = error.line, error
            return None

    def preload_imports(self, spec: TargetSpec) -> None:
        """Make a small run like `spec`, so that workers forked from this process have its imports."""
        self.progress("importing torch and the model's code")
        if _has_workers():
            small = spec.edit(
                model="pythia-70m", model_is_size=False, context_length=8, batch_size=1, steps=1, vocab_size=None,
                lengths=None, parallel=spec.parallel and "fsdp", rank=None, fixes=(),
            )  # fmt: skip
            with contextlib.suppress(MemprofError):  # the runs themselves raise it again
                profile(small, explained=False)
            freeze_existing_objects()

    def run_in_parallel(self, requests: Iterable[tuple[TargetSpec, int]]) -> None:
        """Run pairs of a spec and micro-batches in parallel, on all cores; `run` returns and counts the outcomes."""
        left = [
            key
            for key in dict.fromkeys(requests)
            if key not in self._outcome_by_run and key not in self._prefetched_runs
        ]
        if len(left) > 1 and _has_workers():
            from memprof.workload.pool import run_all

            tasks = [functools.partial(self._run, *key) for key in left]
            self._prefetched_runs |= zip(left, run_all(tasks, self.progress), strict=True)

    def run_searches(self, tasks: Sequence[Callable[[], Result]]) -> list[Result]:
        """Return the results of independent searches with this simulator, in order.

        The searches run in parallel on all cores, each with the outcomes known now.
        """
        if len(tasks) < 2 or not _has_workers():
            return [task() for task in tasks]
        from memprof.workload.pool import run_all

        def search(task: Callable[[], Result]) -> tuple[Result, _OutcomeByRun, dict[str, str], MemprofError | None]:
            """Run `task` in a worker process, with a copy of the simulator; return its result and what it learned."""
            return task(), self._outcome_by_run, self.error_by_label, self.last_error

        answers = []
        for found in run_all([functools.partial(search, task) for task in tasks], self.progress):
            if isinstance(found, MemprofError):
                raise found
            answer, known, failures, refusal = found
            self._outcome_by_run |= known
            self.error_by_label |= failures
            self.last_error = refusal or self.last_error
            answers.append(answer)
        return answers

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
        """Return the largest number at which the run of `make_spec` fits, and the next (`find_limit`); both are run."""
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
    from memprof.workload.pool import number_of_workers  # needs torch

    return number_of_workers() > 1
