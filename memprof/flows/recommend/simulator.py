"""Runs of many specs on one GPU, each made once; of each only what a recommendation needs is kept."""

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
from memprof.watch.collection import freeze_libraries

Answer = TypeVar("Answer")
_Runs = dict[tuple[TargetSpec, int], SimulatedRun]


class Simulator:
    """Makes runs and remembers them; `seeks_room` is that of `outcome_of`."""

    def __init__(self, gpu: Gpu, progress: Callable[[str], None], *, seeks_room: bool = False) -> None:
        self.gpu = gpu
        self.progress = progress
        self.failures: dict[str, str] = {}  # what was tried and does not apply -> why
        self.refusal: MemprofError | None = None  # the last of these
        self._outcome_of = functools.partial(outcome_of, gpu=gpu, seeks_room=seeks_room)
        self._known: _Runs = {}
        self._ready: dict[tuple[TargetSpec, int], SimulatedRun | MemprofError] = {}  # made, and not yet requested

    def __len__(self) -> int:
        """Return how many runs were made."""
        return len(self._known)

    @property
    def usable_bytes(self) -> int:
        """Return what the GPU has for tensors."""
        return self.gpu.total_bytes - self.gpu.context_bytes

    def has_room(self, outcome: SimulatedRun) -> bool:
        """Say whether a run fits without the allocator giving anything back on the way."""
        return outcome.fits and outcome.needed_bytes <= self.gpu.total_bytes

    def rank(self, outcome: SimulatedRun) -> tuple[bool, bool, float]:
        """Return a sort key: headroom first, then what fits with allocator retries, and of these the quickest."""
        return not outcome.fits, not self.has_room(outcome), outcome.seconds

    def run(self, spec: TargetSpec, label: str, micro_batches: int = 1) -> SimulatedRun:
        """Return the outcome of `spec` with so many micro-batches in a step; raise MemprofError if it cannot be run."""
        key = spec, micro_batches
        if key not in self._known:
            self.progress(f"run {len(self) + 1}: {label}")
            made = self._ready.pop(key, None)
            if isinstance(made, MemprofError):
                raise made
            self._known[key] = made or self._run(spec, micro_batches)
        return self._known[key]

    def try_run(self, spec: TargetSpec, label: str, micro_batches: int = 1) -> SimulatedRun | None:
        """Run `spec`; None where the run cannot be made, and `failures` says why."""
        try:
            return self.run(spec, label, micro_batches)
        except MemprofError as error:
            self.failures[label], self.refusal = error.line, error
            return None

    def warm(self, spec: TargetSpec) -> None:
        """Import what runs like `spec` need, once for all workers that are forked from this process, by a small run."""
        self.progress("importing torch and the model's code")
        if _has_workers():
            small = spec.edit(
                model="pythia-70m", model_is_size=False, context_length=8, batch_size=1, steps=1, vocab_size=None,
                lengths=None, parallel=spec.parallel and "fsdp", rank=None, fixes=(),
            )  # fmt: skip
            with contextlib.suppress(MemprofError):  # whatever it is, the runs themselves will say it
                profile(small, explained=False)
            freeze_libraries()

    def make(self, questions: Iterable[tuple[TargetSpec, int]]) -> None:
        """Run these at once, on all cores; they count when they are requested (`run`)."""
        left = [key for key in dict.fromkeys(questions) if key not in self._known and key not in self._ready]
        if len(left) > 1 and _has_workers():
            from memprof.workload.pool import run_all

            works = [functools.partial(self._run, *key) for key in left]
            self._ready |= zip(left, run_all(works, self.progress), strict=True)

    def searches(self, works: Sequence[Callable[[], Answer]]) -> list[Answer]:
        """Return what each of `works` finds with this simulator, as if they were asked in their order.

        None of them needs what another finds: they run at once, each with what is known now, on all cores.
        """
        if len(works) < 2 or not _has_workers():
            return [work() for work in works]
        from memprof.workload.pool import run_all

        def search(work: Callable[[], Answer]) -> tuple[Answer, _Runs, dict[str, str], MemprofError | None]:
            """Do one in a process of its own, which has a simulator of its own: return what that knows then."""
            return work(), self._known, self.failures, self.refusal

        answers = []
        for found in run_all([functools.partial(search, work) for work in works], self.progress):
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
        """Find the largest number for which the run of `spec_of` fits, and the next (`find_limit`): both were run."""
        available = self.gpu.total_bytes

        def needed(number: int) -> int:
            outcome = self.run(spec_of(number), label_of(number), micro_batches)
            return counted_bytes(outcome.needed_bytes, available, fits=outcome.fits)

        return find_limit(needed, available, low=1, high=high, grain=grain, begin=begin, likely=likely)

    def _run(self, spec: TargetSpec, micro_batches: int) -> SimulatedRun:
        outcome = self._outcome_of(capture_trace(spec), spec, micro_batches)
        freeze_libraries()  # what a run leaves in circles goes before the next
        return outcome


def _has_workers() -> bool:
    from memprof.workload.pool import number_of_workers  # needs torch

    return number_of_workers() > 1
