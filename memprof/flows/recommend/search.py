"""The search for the configuration of a model, a goal and a GPU, by simulated runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass

from memprof.errors import UsageError
from memprof.fixes.catalog import check_installed
from memprof.flows.recommend.outcome import SimulatedRun
from memprof.flows.recommend.plans import Activations, Goal, Plan, base_spec, tiers
from memprof.flows.recommend.simulator import Simulator
from memprof.report.documents.recommendation import LargestFit
from memprof.spec import TargetSpec

GRAIN = 256  # tokens between two context lengths of a search
MAX_CONTEXT = 1 << 20  # of a model without a limit of its own
MAX_BATCH = 1 << 14
TIE = 0.005  # steps whose times differ by a smaller share are equally fast: the one that needs less memory is taken
SCREENED = 14  # runs of a search before it settles; the limits, the check and the alternatives come on top
DEFAULT_EFFECTIVE_BATCH = 8


@dataclass(frozen=True, slots=True)
class Question:
    """The question that a search answers."""

    goal: Goal
    # Sequences in an optimizer step, or at a time. None: 8, or `micro_batch` if that is given (inference: 1).
    effective_batch: int | None = None
    precision: str | None = None  # half, amp, float32, int8 or nf4 alone
    micro_batch: int | None = None  # this one alone
    half: str | None = None  # the half precision; None: the GPU's

    @property
    def batch(self) -> int:
        """Return the effective batch, also where it is not given."""
        default = 1 if self.goal is Goal.INFER else DEFAULT_EFFECTIVE_BATCH
        return self.effective_batch or self.micro_batch or default


@dataclass(frozen=True, slots=True)
class Tried:
    """A plan at a micro-batch, and what came of it."""

    plan: Plan
    micro_batch: int
    accumulation: int
    outcome: SimulatedRun

    @property
    def label(self) -> str:
        """Return what it is, in a line of a table."""
        return self.plan.label(self.micro_batch)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search; `chosen` is None if nothing fits, and `least` then needs least."""

    chosen: Tried | None
    least: Tried | None
    tried: tuple[Tried, ...]


class Search:
    """Searches the configurations of a goal; `base` names model, context length and GPU."""

    def __init__(self, runs: Simulator, base: TargetSpec, question: Question) -> None:
        self.runs = runs
        self.goal, self.effective_batch, self.micro_batch = question.goal, question.batch, question.micro_batch
        self.base = base_spec(self.goal, base)
        self.tiers = self._installed(tiers(self.goal, runs.gpu, question.precision, question.half))
        self.refused: set[str] = set()  # fixes that do not apply to this model
        self.tried: dict[tuple[Plan, int], Tried] = {}

    def _installed(self, kinds: list[Plan]) -> list[Plan]:
        """Return those whose packages are there; raise UsageError if none are."""
        missing: dict[str, UsageError] = {}
        for tier in kinds:
            try:
                check_installed(tier.spec(self.base, 1))
            except UsageError as error:
                missing[tier.label()] = error
        if len(missing) == len(kinds):
            raise next(iter(missing.values()))
        self.runs.failures |= {label: error.line for label, error in missing.items()}
        return [tier for tier in kinds if tier.label() not in missing]

    def search(self) -> SearchResult:
        """Find the quickest configuration among those that fit and give up least.

        Kinds of runs are asked in turn, those that give up nothing first, each with everything on that saves memory. Of
        those kinds that give up no more than the first that fits, all ways to run are then tried, each at the largest
        micro-batch that fits.
        """
        smallest = self.sizes()[0]
        given_up: str | None = None
        best: Tried | None = None
        for tier in self.tiers:
            if given_up is not None and tier.given_up != given_up:
                break
            lean = self._leanest(tier, smallest)
            if lean is not None and not lean.outcome.fits and self.goal is not Goal.INFER:
                lean = self.at(dataclasses.replace(lean.plan, activations=Activations.BOTH), smallest) or lean
            if lean is None or not lean.outcome.fits:
                continue
            given_up = tier.given_up
            self._make(tier.variants(), smallest)
            fitting = [one for one in (self.at(plan, smallest) for plan in tier.variants()) if one and one.outcome.fits]
            for one in sorted(fitting, key=lambda one: one.outcome.seconds):
                best = self._better(best, self._largest_micro_batch(one, self._better(best, one)))
        tried = tuple(self.tried.values())
        least = min(tried, key=lambda one: one.outcome.needed_bytes, default=None)
        return SearchResult(best, least, tried)

    def _leanest(self, tier: Plan, micro_batch: int) -> Tried | None:
        """Run the kind with everything on that saves memory and applies to the model."""
        lean = tier.leanest()
        plans = [
            dataclasses.replace(lean, activations=activations, chunked_loss=chunked)
            for activations in (lean.activations, Activations.KEPT)
            for chunked in (lean.chunked_loss, False)
        ]
        attempts = (self.at(plan, micro_batch) for plan in dict.fromkeys(plans))
        return next((tried for tried in attempts if tried is not None), None)

    def sizes(self) -> list[int]:
        """Return the micro-batches in question: those that divide the effective batch."""
        if self.micro_batch is not None:
            return [self.micro_batch]
        if self.goal is Goal.INFER:
            return [self.effective_batch]
        return [size for size in range(1, self.effective_batch + 1) if self.effective_batch % size == 0]

    def at(self, plan: Plan, micro_batch: int) -> Tried | None:
        """Run a plan at a micro-batch; None if it does not apply: a fix that was refused is not tried again.

        With accumulation, the gradients of earlier micro-batches are there in every later one. One micro-batch on
        gradients that zero_grad left as zeros is the same to the allocator, and takes half the time to run.
        """
        key = plan, micro_batch
        if not self.refused.isdisjoint(plan.fixes):
            return None
        if key not in self.tried:
            spec, accumulation = self._step_spec(plan, micro_batch)
            label = plan.label(micro_batch)
            outcome = self.runs.try_run(spec, label, accumulation)
            if outcome is None:
                # The message begins with the name of the one that does not apply to this model.
                why = self.runs.failures[label]
                self.refused |= {name for name in plan.fixes if why.startswith(name)}
                return None
            self.tried[key] = Tried(plan, micro_batch, accumulation, outcome)
        return self.tried[key]

    def _step_spec(self, plan: Plan, micro_batch: int) -> tuple[TargetSpec, int]:
        accumulation = 1 if self.goal is Goal.INFER else max(self.effective_batch // micro_batch, 1)
        spec = plan.spec(self.base, micro_batch)
        return spec.edit(zero_grad="zero") if accumulation > 1 else spec, accumulation

    def _make(self, plans: Iterable[Plan], micro_batch: int) -> None:
        """Make the runs of these at once, but for what was refused."""
        self.runs.make(self._step_spec(plan, micro_batch) for plan in plans if self.refused.isdisjoint(plan.fixes))

    def confirmed(self, tried: Tried) -> Tried:
        """Run it as it will be run: with its accumulation."""
        spec = tried.plan.spec(self.base, tried.micro_batch, tried.accumulation)
        outcome = self.runs.run(spec, f"check of {tried.label}", tried.accumulation)
        return dataclasses.replace(tried, outcome=outcome)

    def batch_limit(self, tried: Tried) -> LargestFit:
        """Find the largest micro-batch of this configuration."""
        accumulation = min(tried.accumulation, 2)
        return self.runs.limit(
            lambda size: tried.plan.spec(self.base, size, accumulation),
            tried.plan.label,
            tried.accumulation,
            begin=tried.micro_batch,
            high=MAX_BATCH,
        )

    def context_limit(self, tried: Tried, longest: int | None) -> LargestFit:
        """Find the longest context of this configuration, in steps of GRAIN tokens; it has fitted at its own.

        `longest` is the model's; what is requested beyond it is looked at beyond it.
        """
        now = tried.outcome.target.context_length or 0
        high = MAX_CONTEXT
        if longest is not None and now <= longest - (self.base.new_tokens or 0):
            high = longest - (self.base.new_tokens or 0)

        def spec_of(length: int, accumulation: int) -> TargetSpec:
            return tried.plan.spec(self.base.edit(context_length=length), tried.micro_batch, accumulation)

        def label(length: int) -> str:
            return f"context {length:,}"

        def limit(accumulation: int) -> LargestFit:
            make = functools.partial(spec_of, accumulation=accumulation)
            return self.runs.limit(make, label, tried.accumulation, begin=now, high=high, grain=GRAIN)

        # The second micro-batch has all that a later one has; looked for with two, the limit is then run with all.
        few = min(tried.accumulation, 2)
        found = limit(few)
        if found.largest and few < tried.accumulation:
            spec = spec_of(found.largest, tried.accumulation)
            if not self.runs.run(spec, label(found.largest), tried.accumulation).fits:
                return limit(tried.accumulation)
        return found

    def _largest_micro_batch(self, first: Tried, best: Tried | None) -> Tried:
        """Find the best of a plan: up to the largest micro-batch that fits, unless it cannot be quicker than `best`.

        `first` is the plan at the smallest micro-batch, which fits, and `best` the quickest so far.
        """
        sizes, plan, found = self.sizes(), first.plan, first
        low, high = 0, len(sizes)
        while high - low > 1 and len(self.runs) < SCREENED and not self._is_slower_anyway(found, best):
            middle = self._guess(plan, sizes, low, high)
            tried = self.at(plan, sizes[middle])
            if tried is None:
                break
            if tried.outcome.fits:
                low, found = middle, self._better(found, tried) or found
            else:
                high = middle
        return found

    def _guess(self, plan: Plan, sizes: list[int], low: int, high: int) -> int:
        """Return which size to try: the largest by what a sequence takes, if two sizes are known; else the next."""
        known = sorted((size, one.outcome) for (of, size), one in self.tried.items() if of == plan)[-2:]
        if len(known) < 2:
            return low + 1
        (one, before), (two, after) = known
        slope = (after.needed_bytes - before.needed_bytes) / (two - one)
        if slope <= 0:
            return high - 1
        most = one + (self.runs.gpu.total_bytes - before.needed_bytes) / slope
        fitting = [place for place in range(low + 1, high) if sizes[place] <= most]
        return max(fitting, default=low + 1)

    def _is_slower_anyway(self, first: Tried, best: Tried | None) -> bool:
        """Say whether operations and transfers alone take as long at any micro-batch as `best` takes."""
        step = first.outcome.step
        if best is None or step is None:
            return False
        rate = max(self.runs.gpu.peak_flops.values(), default=0)
        half = self.runs.gpu.peak_flops.get(first.plan.half, rate)
        least = (step.operations / half if half else 0.0) + step.bus_seconds
        return least > best.outcome.seconds * (1 - TIE)

    @staticmethod
    def _better(one: Tried | None, other: Tried | None) -> Tried | None:
        """Return the quicker of two that fit; of equally quick ones, that which needs less."""
        if one is None or other is None:
            return one or other
        quickest = min(one.outcome.seconds, other.outcome.seconds)
        near = [tried for tried in (one, other) if tried.outcome.seconds <= quickest * (1 + TIE)]
        return min(near, key=lambda tried: tried.outcome.needed_bytes)
