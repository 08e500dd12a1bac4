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
MAX_CONTEXT = 1 << 20  # tokens, for a model without a maximum
MAX_BATCH = 1 << 14
TIE = 0.005  # share of step time below which two runs are equally fast; the run with less memory wins
SCREENED = 14  # runs of a search, without its limits, confirmation and alternatives
DEFAULT_EFFECTIVE_BATCH = 8


@dataclass(frozen=True, slots=True)
class Question:
    """The request to a search: goal, batch and precision."""

    goal: Goal
    # Sequences in an optimizer step (inference: at a time). None: `micro_batch` if given, else 8 (inference: 1).
    effective_batch: int | None = None
    precision: str | None = None  # half, amp, float32, int8 or nf4 alone
    micro_batch: int | None = None  # the only micro-batch to try
    half: str | None = None  # the half precision; None: the GPU's

    @property
    def batch(self) -> int:
        """Return the effective batch or its default."""
        default = 1 if self.goal is Goal.INFER else DEFAULT_EFFECTIVE_BATCH
        return self.effective_batch or self.micro_batch or default


@dataclass(frozen=True, slots=True)
class Tried:
    """A plan at a micro-batch, and the outcome of its run."""

    plan: Plan
    micro_batch: int
    accumulation: int
    outcome: SimulatedRun

    @property
    def label(self) -> str:
        """Return a short description for a row of a table."""
        return self.plan.label(self.micro_batch)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search: the chosen run (None: nothing fits), the run with the least memory, and all runs."""

    chosen: Tried | None
    least: Tried | None
    tried: tuple[Tried, ...]


class Search:
    """Search over the configurations of a goal; `base` names model, context length and GPU."""

    def __init__(self, runs: Simulator, base: TargetSpec, question: Question) -> None:
        self.runs = runs
        self.goal, self.effective_batch, self.micro_batch = question.goal, question.batch, question.micro_batch
        self.base = base_spec(self.goal, base)
        self.tiers = self._filter_installed(tiers(self.goal, runs.gpu, question.precision, question.half))
        self.refused: set[str] = set()  # fixes that do not apply to this model
        self.tried: dict[tuple[Plan, int], Tried] = {}

    def _filter_installed(self, kinds: list[Plan]) -> list[Plan]:
        """Return the tiers whose packages are installed; raise UsageError if no tier's are."""
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
        """Return the quickest configuration that fits, among those that give up the least precision.

        Tiers are tried in turn, those that give up nothing first, each with all exact fixes. In the first that fits,
        and in others that give up the same, all variants that fit are tried, each up to its largest micro-batch
        that fits.
        """
        smallest = self.sizes()[0]
        given_up: str | None = None
        best: Tried | None = None
        for tier in self.tiers:
            if given_up is not None and tier.given_up != given_up:
                break
            lean = self._run_leanest(tier, smallest)
            if lean is not None and not lean.outcome.fits and self.goal is not Goal.INFER:
                lean = self.try_plan(dataclasses.replace(lean.plan, activations=Activations.BOTH), smallest) or lean
            if lean is None or not lean.outcome.fits:
                continue
            given_up = tier.given_up
            self._run_variants(tier.variants(), smallest)
            fitting = [t for t in (self.try_plan(plan, smallest) for plan in tier.variants()) if t and t.outcome.fits]
            for one in sorted(fitting, key=lambda one: one.outcome.seconds):
                best = self._choose_better(best, self._find_micro_batch(one, self._choose_better(best, one)))
        tried = tuple(self.tried.values())
        least = min(tried, key=lambda one: one.outcome.needed_bytes, default=None)
        return SearchResult(best, least, tried)

    def _run_leanest(self, tier: Plan, micro_batch: int) -> Tried | None:
        """Return the run of the tier with as many exact fixes as apply to the model; None if no run succeeds."""
        lean = tier.leanest()
        plans = [
            dataclasses.replace(lean, activations=activations, chunked_loss=chunked)
            for activations in (lean.activations, Activations.KEPT)
            for chunked in (lean.chunked_loss, False)
        ]
        attempts = (self.try_plan(plan, micro_batch) for plan in dict.fromkeys(plans))
        return next((tried for tried in attempts if tried is not None), None)

    def sizes(self) -> list[int]:
        """Return the micro-batch sizes to try: the divisors of the effective batch."""
        if self.micro_batch is not None:
            return [self.micro_batch]
        if self.goal is Goal.INFER:
            return [self.effective_batch]
        return [size for size in range(1, self.effective_batch + 1) if self.effective_batch % size == 0]

    def try_plan(self, plan: Plan, micro_batch: int) -> Tried | None:
        """Return the run of a plan at a micro-batch; None if a fix does not apply (no plan with the fix is run again).

        With accumulation, gradients of earlier micro-batches are live in later ones. One micro-batch on gradients that
        zero_grad left as zeros is the same for the allocator, and takes half the time to run.
        """
        key = plan, micro_batch
        if not self.refused.isdisjoint(plan.fixes):
            return None
        if key not in self.tried:
            spec, accumulation = self._step_spec(plan, micro_batch)
            label = plan.label(micro_batch)
            outcome = self.runs.try_run(spec, label, accumulation)
            if outcome is None:
                # The message begins with the name of the fix that does not apply to this model.
                why = self.runs.failures[label]
                self.refused |= {name for name in plan.fixes if why.startswith(name)}
                return None
            self.tried[key] = Tried(plan, micro_batch, accumulation, outcome)
        return self.tried[key]

    def _step_spec(self, plan: Plan, micro_batch: int) -> tuple[TargetSpec, int]:
        accumulation = 1 if self.goal is Goal.INFER else max(self.effective_batch // micro_batch, 1)
        spec = plan.spec(self.base, micro_batch)
        return spec.edit(zero_grad="zero") if accumulation > 1 else spec, accumulation

    def _run_variants(self, plans: Iterable[Plan], micro_batch: int) -> None:
        """Run `plans` in parallel, without plans whose fixes do not apply."""
        self.runs.make(self._step_spec(plan, micro_batch) for plan in plans if self.refused.isdisjoint(plan.fixes))

    def confirm(self, tried: Tried) -> Tried:
        """Return `tried` with the outcome of a run with its full accumulation."""
        spec = tried.plan.spec(self.base, tried.micro_batch, tried.accumulation)
        outcome = self.runs.run(spec, f"check of {tried.label}", tried.accumulation)
        return dataclasses.replace(tried, outcome=outcome)

    def batch_limit(self, tried: Tried) -> LargestFit:
        """Return the largest micro-batch with which this configuration fits."""
        accumulation = min(tried.accumulation, 2)
        return self.runs.limit(
            lambda size: tried.plan.spec(self.base, size, accumulation),
            tried.plan.label,
            tried.accumulation,
            begin=tried.micro_batch,
            high=MAX_BATCH,
        )

    def context_limit(self, tried: Tried, longest: int | None) -> LargestFit:
        """Return the longest context with which this configuration, which fits, still fits, in steps of GRAIN tokens.

        `longest` is the model's maximum, which does not limit the search if the requested context is longer.
        """
        current_length = tried.outcome.target.context_length or 0
        high = MAX_CONTEXT
        if longest is not None and current_length <= longest - (self.base.new_tokens or 0):
            high = longest - (self.base.new_tokens or 0)

        def spec_of(length: int, accumulation: int) -> TargetSpec:
            return tried.plan.spec(self.base.edit(context_length=length), tried.micro_batch, accumulation)

        def label(length: int) -> str:
            return f"context {length:,}"

        def limit(accumulation: int) -> LargestFit:
            make = functools.partial(spec_of, accumulation=accumulation)
            return self.runs.limit(make, label, tried.accumulation, begin=current_length, high=high, grain=GRAIN)

        # The second micro-batch takes as much as later ones: the limit is found with two, and confirmed with all.
        num_run = min(tried.accumulation, 2)
        found = limit(num_run)
        if found.largest and num_run < tried.accumulation:
            spec = spec_of(found.largest, tried.accumulation)
            if not self.runs.run(spec, label(found.largest), tried.accumulation).fits:
                return limit(tried.accumulation)
        return found

    def _find_micro_batch(self, first: Tried, best: Tried | None) -> Tried:
        """Return the best run of a plan up to its largest micro-batch that fits; stop if no size can beat `best`.

        `first` is the plan's run at the smallest micro-batch, which fits; `best` is the quickest run so far.
        """
        sizes, plan, found = self.sizes(), first.plan, first
        low, high = 0, len(sizes)
        while high - low > 1 and len(self.runs) < SCREENED and not self._cannot_be_quicker(found, best):
            middle = self._guess_size(plan, sizes, low, high)
            tried = self.try_plan(plan, sizes[middle])
            if tried is None:
                break
            if tried.outcome.fits:
                low, found = middle, self._choose_better(found, tried) or found
            else:
                high = middle
        return found

    def _guess_size(self, plan: Plan, sizes: list[int], low: int, high: int) -> int:
        """Return the index of the size to try: the largest that fits by extrapolation of two runs, else the next."""
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

    def _cannot_be_quicker(self, first: Tried, best: Tried | None) -> bool:
        """Return whether operations and transfers alone, at any micro-batch, take longer than the step of `best`."""
        step = first.outcome.step
        if best is None or step is None:
            return False
        rate = max(self.runs.gpu.peak_flops.values(), default=0)
        half = self.runs.gpu.peak_flops.get(first.plan.half, rate)
        least = (step.operations / half if half else 0.0) + step.bus_seconds
        return least > best.outcome.seconds * (1 - TIE)

    @staticmethod
    def _choose_better(one: Tried | None, other: Tried | None) -> Tried | None:
        """Return the quicker of two runs that fit; of equally quick runs, the one with less memory."""
        if one is None or other is None:
            return one or other
        quickest = min(one.outcome.seconds, other.outcome.seconds)
        quickest_runs = [tried for tried in (one, other) if tried.outcome.seconds <= quickest * (1 + TIE)]
        return min(quickest_runs, key=lambda tried: tried.outcome.needed_bytes)
