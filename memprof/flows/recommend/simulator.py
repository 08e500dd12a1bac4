"""Runs of many specs on one card, each made once; of each only what a recommendation needs is kept."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from memprof.catalog import Gpu
from memprof.device.context import CONTEXT_BYTES
from memprof.errors import MemprofError
from memprof.flows.ahead import warm
from memprof.flows.profile import happened
from memprof.flows.recommend.begun import Begun, Run
from memprof.flows.recommend.between import likely_needs
from memprof.flows.recommend.bisection import find_limit
from memprof.flows.recommend.outcome import Asked, SimulatedRun
from memprof.report.documents.recommendation import Bound
from memprof.spec import TargetSpec
from memprof.trace.events import Trace

Answer = TypeVar("Answer")
_TRACES = 4
"""So many are kept."""


class Simulator:
    """Makes runs and remembers them.

    Args:
        seeks_room: as in `Asked`.
        says_where: as in `Asked`.
        begun: whether runs of such a spec begin as one, in a process where its model is built (`Begun`).
    """

    def __init__(
        self,
        gpu: Gpu,
        progress: Callable[[str], None],
        *,
        seeks_room: bool = False,
        says_where: bool = True,
        begun: Callable[[TargetSpec], bool] = lambda spec: True,
    ) -> None:
        self.gpu = gpu
        self._asked = Asked(gpu, seeks_room, says_where)
        self.failures: dict[str, str] = {}
        """What was tried and does not apply -> why."""
        self.refusal: MemprofError | None = None
        """The last of these."""
        self._progress = progress
        self._known: dict[tuple[TargetSpec, int], SimulatedRun] = {}
        self._ahead: dict[tuple[TargetSpec, int], SimulatedRun | MemprofError] = {}
        """What was run before it was asked for."""
        self._traces: dict[tuple[TargetSpec, int], Trace] = {}
        """The last of those that were made, or what `likely_needs` asks of them."""
        self._begun = Begun(self._outcome, begun)

    def __len__(self) -> int:
        """How many runs were made."""
        return len(self._known)

    @property
    def usable_bytes(self) -> int:
        """What the card has for tensors."""
        return self.gpu.total_bytes - CONTEXT_BYTES

    def run(self, spec: TargetSpec, label: str, micro_batches: int = 1, *, traced: bool = False) -> SimulatedRun:
        """The outcome of `spec`; `step` is of a step with so many micro-batches.

        Args:
            traced: a limit is looked for from here.

        Raises:
            MemprofError: it cannot be run.
        """
        key = spec, micro_batches
        if key not in self._known:
            self._progress(f"run {len(self) + 1}: {label}")
            before = self._ahead.pop(key, None)
            if isinstance(before, MemprofError):
                raise before
            self._known[key] = before or self._run(spec, micro_batches, traced)
        return self._known[key]

    def warm(self, spec: TargetSpec) -> None:
        """Import what runs like `spec` need, once for all processes that are forked from this one, by a small one."""
        if not _several_at_once():
            self._progress("importing torch and the model's code")
            return
        warm(spec, self._progress)
        self._collect()

    def close(self) -> None:
        """Nothing more is run."""
        self._begun.close()

    def _collect(self) -> None:
        """The command line switches the collector off, and what a run leaves in circles must go before the next. It is
        young; the libraries' own objects, millions that live for good, are never looked through."""
        if self._begun.is_warm:
            gc.collect(0)
            return
        gc.freeze()
        self._begun.is_warm = True

    def run_ahead(self, questions: Iterable[tuple[TargetSpec, int]]) -> None:
        """Run these at once, on all cores: they are likely to be asked for (`run`), and only then do they count."""
        left = [key for key in dict.fromkeys(questions) if key not in self._known and key not in self._ahead]
        if len(left) > 1 and _several_at_once():
            for spec, _ in left:
                self._begun.begin(spec)
            works = [functools.partial(self._run, *key) for key in left]
            self._ahead |= zip(left, _side_by_side(works, self._progress), strict=True)

    def searches(self, works: Sequence[Callable[[Simulator], Answer]], long: Collection[int] = ()) -> list[Answer]:
        """What each of `works` finds with this simulator, as if they were asked in their order.

        Args:
            works: none of them needs what another finds. They run at once, each with what is known now, on all cores.
            long: as in `side_by_side`.

        Raises:
            MemprofError: one of them does.
        """
        if len(works) < 2 or not _several_at_once():
            return [work(self) for work in works]
        answers = []
        searching = [functools.partial(_searched, work, self) for work in works]
        for found in _side_by_side(searching, self._progress, long):
            if isinstance(found, MemprofError):
                raise found
            self._known |= found.known
            self.failures |= found.failures
            self.refusal = found.refusal or self.refusal
            answers.append(found.answer)
        return answers

    def try_run(
        self, spec: TargetSpec, label: str, micro_batches: int = 1, *, traced: bool = False
    ) -> SimulatedRun | None:
        """The same; None where the run cannot be made, and `failures` says why."""
        try:
            return self.run(spec, label, micro_batches, traced=traced)
        except MemprofError as error:
            self.failures[label], self.refusal = error.line, error
            return None

    def needed_bytes(self, spec: TargetSpec, label: str, micro_batches: int = 1) -> int:
        """What a run needs; if it fits no more than the card has: it may give the cache back on the way. Else more."""
        outcome = self.run(spec, label, micro_batches, traced=True)
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
    ) -> Bound:
        """The largest number for which the run of `spec_of` fits, and the next (`find_limit`): both were run.

        Raises:
            MemprofError: one of the runs cannot be made.
        """
        asked: set[int] = set()

        def needed(number: int) -> int:
            asked.add(number)
            return self.needed_bytes(spec_of(number), label_of(number), micro_batches)

        def guess(number: int) -> int | None:
            keys = {one: (spec_of(one), micro_batches) for one in asked}
            needs = likely_needs({one: self._traces[key] for one, key in keys.items() if key in self._traces}, number)
            if needs is None:
                return None
            return self._counted(needs.required_reserved_bytes + CONTEXT_BYTES, fits=needs.fits)

        return find_limit(needed, self.gpu.total_bytes, low=1, high=high, grain=grain, begin=begin, guess=guess)

    def _counted(self, needed_bytes: int, *, fits: bool) -> int:
        available = self.gpu.total_bytes
        return min(needed_bytes, available) if fits else max(needed_bytes, available + 1)

    def _run(self, spec: TargetSpec, micro_batches: int, traced: bool = False) -> SimulatedRun:
        run = Run(spec, micro_batches, traced)
        made = self._begun.ask(run)
        if made is not None:
            outcome, trace = made
        else:
            trace = happened(spec)
            outcome = self._outcome(run, trace)
            self._collect()
        if trace is not None:
            self._traces[spec, micro_batches] = trace
            if len(self._traces) > _TRACES:
                del self._traces[next(iter(self._traces))]
        return outcome

    def _outcome(self, run: Run, trace: Trace) -> SimulatedRun:
        return self._asked.of(trace, run.spec, run.micro_batches)


@dataclass(frozen=True, slots=True)
class _Found(Generic[Answer]):
    """What a search in a process of its own gives back."""

    answer: Answer
    known: dict[tuple[TargetSpec, int], SimulatedRun]
    failures: dict[str, str]
    refusal: MemprofError | None


def _searched(work: Callable[[Simulator], Answer], runs: Simulator) -> _Found[Answer]:
    answer = work(runs)
    runs.close()
    return _Found(answer, runs._known, runs.failures, runs.refusal)


def _several_at_once() -> bool:
    from memprof.workload.side_by_side import number_of_processes  # needs torch

    return number_of_processes() > 1


def _side_by_side(
    works: Sequence[Callable[[], Answer]], progress: Callable[[str], None], long: Collection[int] = ()
) -> list[Answer | MemprofError]:
    from memprof.workload.side_by_side import side_by_side

    return side_by_side(works, progress, long)
