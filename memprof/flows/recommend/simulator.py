"""Simulated runs of many specs on one GPU, each made once; only the outcome of a run is kept."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from memprof.device.catalog import Gpu
from memprof.errors import MemprofError
from memprof.flows.profile import capture_trace, profile
from memprof.flows.recommend.bisection import counted_bytes, find_limit
from memprof.flows.recommend.outcome import SimulatedRun, outcome_of
from memprof.report.documents.recommendation import LargestFit
from memprof.spec import TargetSpec
from memprof.watch.collection import freeze_existing_objects

Answer = TypeVar("Answer")
_Runs = dict[tuple[TargetSpec, int], SimulatedRun]


class Simulator:
    """Simulator of specs on one GPU with a cache of outcomes; `seeks_room` as in `outcome_of`."""

    def __init__(self, gpu: Gpu, progress: Callable[[str], None], *, seeks_room: bool = False) -> None:
        self.gpu = gpu
        self.progress = progress
        self.failures: dict[str, str] = {}  # label of a failed run -> error
        self.refusal: MemprofError | None = None  # the last error
        self._outcome_of = functools.partial(outcome_of, gpu=gpu, seeks_room=seeks_room)
        self._known: _Runs = {}
        self._ready: dict[tuple[TargetSpec, int], SimulatedRun | MemprofError] = {}  # not yet requested

    def __len__(self) -> int:
        """Return the number of runs requested so far."""
        return len(self._known)

    @property
    def usable_bytes(self) -> int:
        """Return the GPU's capacity less the CUDA context."""
        return self.gpu.total_bytes - self.gpu.context_bytes

    def has_room(self, outcome: SimulatedRun) -> bool:
        """Return whether a run fits without allocator retries."""
        return outcome.fits and outcome.needed_bytes <= self.gpu.total_bytes

    def rank(self, outcome: SimulatedRun) -> tuple[bool, bool, float]:
        """Return a sort key: runs with headroom first, then runs that fit with allocator retries, by step time."""
        return not outcome.fits, not self.has_room(outcome), outcome.seconds

    def run(self, spec: TargetSpec, label: str, micro_batches: int = 1) -> SimulatedRun:
        """Return the outcome of `spec` with `micro_batches` in a step; raise MemprofError if the run fails."""
        key = spec, micro_batches
        if key not in self._known:
            self.progress(f"run {len(self) + 1}: {label}")
            ready = self._ready.pop(key, None)
            if isinstance(ready, MemprofError):
                raise ready
            self._known[key] = ready or self._run(spec, micro_batches)
        return self._known[key]

    def try_run(self, spec: TargetSpec, label: str, micro_batches: int = 1) -> SimulatedRun | None:
        """Return the outcome of `spec`; None if the run fails, with the error in `failures`."""
        try:
            return self.run(spec, label, micro_batches)
        except MemprofError as error:
            self.failures[label], self.refusal = error.line, error
            return None

    def warm_up(self, spec: TargetSpec) -> None:
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

    def make(self, questions: Iterable[tuple[TargetSpec, int]]) -> None:
        """Run pairs of a spec and micro-batches in parallel, on all cores; `run` returns and counts the outcomes."""
        left = [key for key in dict.fromkeys(questions) if key not in self._known and key not in self._ready]
        if len(left) > 1 and _has_workers():
            from memprof.workload.pool import run_all

            tasks = [functools.partial(self._run, *key) for key in left]
            self._ready |= zip(left, run_all(tasks, self.progress), strict=True)

    def run_searches(self, tasks: Sequence[Callable[[], Answer]]) -> list[Answer]:
        """Return the results of independent searches with this simulator, in order.

        The searches run in parallel on all cores, each with the outcomes known now.
        """
        if len(tasks) < 2 or not _has_workers():
            return [task() for task in tasks]
        from memprof.workload.pool import run_all

        def search(task: Callable[[], Answer]) -> tuple[Answer, _Runs, dict[str, str], MemprofError | None]:
            """Run `task` in a worker process, with a copy of the simulator; return its result and what it learned."""
            return task(), self._known, self.failures, self.refusal

        answers = []
        for found in run_all([functools.partial(search, task) for task in tasks], self.progress):
            if isinstance(found, MemprofError):
                raise found
            answer, known, failures, refusal = found
            self._known |= known
            self.failures |= failures
            self.refusal = refusal or self.refusal
            answers.append(answer)
        return answers

    def limit(
        self,
        spec_of: Callable[[int], TargetSpec],
        label_of: Callable[[int], str],
        micro_batches: int = 1,
        *,
        begin: int,
        high: int,
        grain: int = 1,
        likely: int | None = None,
    ) -> LargestFit:
        """Return the largest number for which the run of `spec_of` fits, and the next (`find_limit`); both are run."""
        available = self.gpu.total_bytes

        def needed(number: int) -> int:
            outcome = self.run(spec_of(number), label_of(number), micro_batches)
            return counted_bytes(outcome.needed_bytes, available, fits=outcome.fits)

        return find_limit(needed, available, low=1, high=high, grain=grain, begin=begin, likely=likely)

    def _run(self, spec: TargetSpec, micro_batches: int) -> SimulatedRun:
        outcome = self._outcome_of(capture_trace(spec), spec, micro_batches)
        freeze_existing_objects()  # collects reference cycles of the run
        return outcome


def _has_workers() -> bool:
    from memprof.workload.pool import number_of_workers  # needs torch

    return number_of_workers() > 1
