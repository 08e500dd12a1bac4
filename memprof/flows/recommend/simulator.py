"""Runs of many specs on one card, each made once; of each only what a recommendation needs is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from memprof.catalog import Gpu
from memprof.device.context import CONTEXT_BYTES
from memprof.errors import MemprofError
from memprof.flows.profile import happened
from memprof.flows.recommend.bisection import find_limit
from memprof.flows.recommend.outcome import Asked, SimulatedRun
from memprof.flows.several import warm
from memprof.report.documents.recommendation import Bound
from memprof.spec import TargetSpec
from memprof.watch.collection import freeze_libraries

Answer = TypeVar("Answer")


class Simulator:
    """Makes runs and remembers them.

    Args:
        seeks_room: as in `Asked`.
        says_where: as in `Asked`.
    """

    def __init__(
        self,
        gpu: Gpu,
        progress: Callable[[str], None],
        *,
        seeks_room: bool = False,
        says_where: bool = True,
    ) -> None:
        self.gpu = gpu
        self._asked = Asked(gpu, seeks_room, says_where)
        self.failures: dict[str, str] = {}
        """What was tried and does not apply -> why."""
        self.refusal: MemprofError | None = None
        """The last of these."""
        self._progress = progress
        self._known: dict[tuple[TargetSpec, int], SimulatedRun] = {}
        self._ready: dict[tuple[TargetSpec, int], SimulatedRun | MemprofError] = {}
        """What was run at once with others and not yet asked for."""

    def __len__(self) -> int:
        """How many runs were made."""
        return len(self._known)

    @property
    def usable_bytes(self) -> int:
        """What the card has for tensors."""
        return self.gpu.total_bytes - CONTEXT_BYTES

    def run(self, spec: TargetSpec, label: str, micro_batches: int = 1) -> SimulatedRun:
        """The outcome of `spec`; `step` is of a step with so many micro-batches.

        Raises:
            MemprofError: it cannot be run.
        """
        key = spec, micro_batches
        if key not in self._known:
            self._progress(f"run {len(self) + 1}: {label}")
            made = self._ready.pop(key, None)
            if isinstance(made, MemprofError):
                raise made
            self._known[key] = made or self._run(spec, micro_batches)
        return self._known[key]

    def warm(self, spec: TargetSpec) -> None:
        """Import what runs like `spec` need, once for all workers."""
        if not _several_at_once():
            self._progress("importing torch and the model's code")
            return
        warm(spec, self._progress)
        freeze_libraries()

    def make(self, questions: Iterable[tuple[TargetSpec, int]]) -> None:
        """Run these at once, on all cores; they count when they are asked for (`run`)."""
        left = [key for key in dict.fromkeys(questions) if key not in self._known and key not in self._ready]
        if len(left) > 1 and _several_at_once():
            works = [functools.partial(self._run, *key) for key in left]
            self._ready |= zip(left, _run_all(works, self._progress), strict=True)

    def searches(self, works: Sequence[Callable[[Simulator], Answer]]) -> list[Answer]:
        """What each of `works` finds with this simulator, as if they were asked in their order.

        Args:
            works: none of them needs what another finds. They run at once, each with what is known now, on all cores.

        Raises:
            MemprofError: one of them does.
        """
        if len(works) < 2 or not _several_at_once():
            return [work(self) for work in works]
        answers = []
        searching = [functools.partial(_searched, work, self) for work in works]
        for found in _run_all(searching, self._progress):
            if isinstance(found, MemprofError):
                raise found
            self._known |= found.known
            self.failures |= found.failures
            self.refusal = found.refusal or self.refusal
            answers.append(found.answer)
        return answers

    def try_run(self, spec: TargetSpec, label: str, micro_batches: int = 1) -> SimulatedRun | None:
        """The same; None where the run cannot be made, and `failures` says why."""
        try:
            return self.run(spec, label, micro_batches)
        except MemprofError as error:
            self.failures[label], self.refusal = error.line, error
            return None

    def needed_bytes(self, spec: TargetSpec, label: str, micro_batches: int = 1) -> int:
        """What a run needs; if it fits no more than the card has: it may give the cache back on the way. Else more."""
        outcome = self.run(spec, label, micro_batches)
        return self._counted(outcome.needed_bytes, fits=outcome.fits)

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
    ) -> Bound:
        """The largest number for which the run of `spec_of` fits, and the next (`find_limit`): both were run.

        Raises:
            MemprofError: one of the runs cannot be made.
        """

        def needed(number: int) -> int:
            return self.needed_bytes(spec_of(number), label_of(number), micro_batches)

        return find_limit(needed, self.gpu.total_bytes, low=1, high=high, grain=grain, begin=begin, likely=likely)

    def _counted(self, needed_bytes: int, *, fits: bool) -> int:
        available = self.gpu.total_bytes
        return min(needed_bytes, available) if fits else max(needed_bytes, available + 1)

    def _run(self, spec: TargetSpec, micro_batches: int) -> SimulatedRun:
        outcome = self._asked.of(happened(spec), spec, micro_batches)
        freeze_libraries()  # what a run leaves in circles goes before the next
        return outcome


@dataclass(frozen=True, slots=True)
class _Found(Generic[Answer]):
    """What a search in a process of its own gives back."""

    answer: Answer
    known: dict[tuple[TargetSpec, int], SimulatedRun]
    failures: dict[str, str]
    refusal: MemprofError | None


def _searched(work: Callable[[Simulator], Answer], runs: Simulator) -> _Found[Answer]:
    return _Found(work(runs), runs._known, runs.failures, runs.refusal)


def _several_at_once() -> bool:
    from memprof.workload.pool import number_of_workers  # needs torch

    return number_of_workers() > 1


def _run_all(works: Sequence[Callable[[], Answer]], progress: Callable[[str], None]) -> list[Answer | MemprofError]:
    from memprof.workload.pool import run_all

    return run_all(works, progress)
