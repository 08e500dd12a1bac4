"""The search for the configuration of a model, a goal and a GPU, by simulated runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass

from memprof.errors import UsageError
from memprof.fixes.catalog import FIXES, check_installed, find_device_reason
from memprof.flows.recommend.outcome import SimulatedRun
from memprof.flows.recommend.plans import Activations, Goal, Plan, list_tiers, make_base_spec
from memprof.flows.recommend.simulator import Simulator
from memprof.report.documents.recommendation import LargestFit
from memprof.spec import TargetSpec

CONTEXT_STEP = 256  # tokens between two context lengths of a search
MAX_CONTEXT = 1 << 20  # tokens, for a model without a maximum
MAX_BATCH = 1 << 14
TIE_TOLERANCE = 0.005  # share of step time below which two runs are equally fast; the run with less memory wins
MAX_SEARCH_RUNS = 14  # runs of a search, without those for limits, confirmation and alternatives
DEFAULT_EFFECTIVE_BATCH = 8


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """The user's request to a search: goal, batch size and precision."""

    goal: Goal
    # Sequences in an optimizer step (inference: at a time). None: `micro_batch` if given, else 8 (inference: 1).
    effective_batch: int | None = None
    precision: str | None = None  # half, amp, float32, int8 or nf4 alone
    micro_batch: int | None = None  # the only micro-batch to try
    half: str | None = None  # the half precision; None: the GPU's

    @property
    def batch_size(self) -> int:
        """Return the effective batch or its default."""
        default = 1 if self.goal is Goal.INFER else DEFAULT_EFFECTIVE_BATCH
        return self.effective_batch or self.micro_batch or default


@dataclass(frozen=True, slots=True)
class PlanRun:
    """A simulated run of a plan at one micro-batch size, with the outcome."""

    plan: Plan
    micro_batch: int
    accumulation: int
    outcome: SimulatedRun

    @property
    def label(self) -> str:
        """Return a short description for a row of a table."""
        return self.plan.format_label(self.micro_batch)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search: the chosen run (None: nothing fits), the run with the least memory, and all runs."""

    chosen: PlanRun | None
    leanest: PlanRun | None
    runs: tuple[PlanRun, ...]


class Search:
    """Search over the configurations of a goal; `base_spec` has the model, context length and GPU."""

    def __init__(self, simulator: Simulator, base_spec: TargetSpec, request: SearchRequest) -> None:
        self.simulator = simulator
        self.goal, self.effective_batch, self.micro_batch = request.goal, request.batch_size, request.micro_batch
        self.base_spec = make_base_spec(self.goal, base_spec)
        self.tiers = self._filter_installed(list_tiers(self.goal, simulator.gpu, request.precision, request.half))
        self.rejected_fixes: set[str] = set()  # fixes that do not apply to this model
        self.run_by_plan: dict[tuple[Plan, int], PlanRun] = {}

    def _moves_in_vain(self, plan: Plan) -> bool:
        """Return whether `plan` moves memory to the host, which shares it with the GPU."""
        names = plan.make_spec(self.base_spec, 1).fixes
        return any(find_device_reason(FIXES[name], self.simulator.gpu) is not None for name in names)

    def _filter_installed(self, tiers: list[Plan]) -> list[Plan]:
        """Return those of `tiers` that can run here, and whose packages are installed; raise UsageError if none is."""
        tiers = [tier for tier in tiers if not self._moves_in_vain(tier)]
        error_by_label: dict[str, UsageError] = {}
        for tier in tiers:
            try:
                check_installed(tier.make_spec(self.base_spec, 1))
            except UsageError as error:
                error_by_label[tier.format_label()] = error
        if len(error_by_label) == len(tiers):
            raise next(iter(error_by_label.values()))
        self.simulator.error_by_label |= {label: error.line for label, error in error_by_label.items()}
        return [tier for tier in tiers if tier.format_label() not in error_by_label]

    def search(self) -> SearchResult:
        """Return the quickest configuration that fits, among those that give up the least precision.

        Tiers are tried in order of their loss of precision, each first with all exact fixes. For the first tier that
        fits, and tiers with an equal loss, all variants are run, each up to its largest micro-batch that fits.
        """
        smallest = self.list_micro_batches()[0]
        precision_loss: str | None = None
        best: PlanRun | None = None
        for tier in self.tiers:
            if precision_loss is not None and tier.precision_loss != precision_loss:
                break
            leanest_run = self._run_leanest(tier, smallest)
            if leanest_run is not None and not leanest_run.outcome.fits and self.goal is not Goal.INFER:
                leanest_plan = dataclasses.replace(leanest_run.plan, activations=Activations.CHECKPOINTED_OFFLOADED)
                leanest_run = self.run_plan(leanest_plan, smallest) or leanest_run
            if leanest_run is None or not leanest_run.outcome.fits:
                continue
            precision_loss = tier.precision_loss
            variants = [plan for plan in tier.list_variants() if not self._moves_in_vain(plan)]
            self._run_in_parallel(variants, smallest)
            fitting_runs = [run for plan in variants if (run := self.run_plan(plan, smallest)) and run.outcome.fits]
            for run in sorted(fitting_runs, key=lambda run: run.outcome.seconds):
                best = self._choose_better(best, self._find_micro_batch(run, self._choose_better(best, run)))
        runs = tuple(self.run_by_plan.values())
        leanest = min(runs, key=lambda run: run.outcome.needed_bytes, default=None)
        return SearchResult(best, leanest, runs)

    def _run_leanest(self, tier: Plan, micro_batch: int) -> PlanRun | None:
        """Return the run of the tier with as many exact fixes as apply to the model; None if no run succeeds."""
        lean_plan = tier.minimize_memory()
        plans = [
            dataclasses.replace(lean_plan, activations=activations, chunked_loss=chunked_loss)
            for activations in (lean_plan.activations, Activations.ON_GPU)
            for chunked_loss in (lean_plan.chunked_loss, False)
        ]
        attempts = (self.run_plan(plan, micro_batch) for plan in dict.fromkeys(plans))
        return next((run for run in attempts if run is not None), None)

    def list_micro_batches(self) -> list[int]:
        """Return the micro-batch sizes to try: the divisors of the effective batch."""
        if self.micro_batch is not None:
            return [self.micro_batch]
        if self.goal is Goal.INFER:
            return [self.effective_batch]
        return [size for size in range(1, self.effective_batch + 1) if self.effective_batch % size == 0]

    def run_plan(self, plan: Plan, micro_batch: int) -> PlanRun | None:
        """Return the cached or new run of a plan at a micro-batch size; None if a fix of the plan does not apply.

        With gradient accumulation, one micro-batch is run on gradients that zero_grad left as zeros, which takes the
        memory of a later micro-batch.
        """
        key = plan, micro_batch
        if not self.rejected_fixes.isdisjoint(plan.fixes):
            return None
        if key not in self.run_by_plan:
            spec, accumulation = self._make_step_spec(plan, micro_batch)
            label = plan.format_label(micro_batch)
            outcome = self.simulator.try_run(spec, label, accumulation)
            if outcome is None:
                # The message begins with the name of the fix that does not apply to this model.
                reason = self.simulator.error_by_label[label]
                self.rejected_fixes |= {name for name in plan.fixes if reason.startswith(name)}
                return None
            self.run_by_plan[key] = PlanRun(plan, micro_batch, accumulation, outcome)
        return self.run_by_plan[key]

    def _make_step_spec(self, plan: Plan, micro_batch: int) -> tuple[TargetSpec, int]:
        accumulation = 1 if self.goal is Goal.INFER else max(self.effective_batch // micro_batch, 1)
        spec = plan.make_spec(self.base_spec, micro_batch)
        return spec.edit(zero_grad="zero") if accumulation > 1 else spec, accumulation

    def _run_in_parallel(self, plans: Iterable[Plan], micro_batch: int) -> None:
        """Run `plans` in parallel, without plans whose fixes do not apply."""
        self.simulator.run_in_parallel(
            self._make_step_spec(plan, micro_batch) for plan in plans if self.rejected_fixes.isdisjoint(plan.fixes)
        )

    def confirm_run(self, run: PlanRun) -> PlanRun:
        """Run the plan of `run` again, with all its gradient accumulation; return `run` with the new outcome."""
        spec = run.plan.make_spec(self.base_spec, run.micro_batch, run.accumulation)
        outcome = self.simulator.run(spec, f"check of {run.label}", run.accumulation)
        return dataclasses.replace(run, outcome=outcome)

    def find_batch_limit(self, run: PlanRun) -> LargestFit:
        """Return the largest micro-batch size with which the configuration of `run` fits."""
        accumulation = min(run.accumulation, 2)
        return self.simulator.find_run_limit(
            lambda size: run.plan.make_spec(self.base_spec, size, accumulation),
            run.plan.format_label,
            run.accumulation,
            start=run.micro_batch,
            high=MAX_BATCH,
        )

    def find_context_limit(self, run: PlanRun, max_length: int | None) -> LargestFit:
        """Return the longest context length with which the configuration of `run` fits, in steps of CONTEXT_STEP.

        `max_length` is the model's maximum, which is ignored if the requested context is longer.
        """
        current_length = run.outcome.target.context_length or 0
        high = MAX_CONTEXT
        if max_length is not None and current_length <= max_length - (self.base_spec.new_tokens or 0):
            high = max_length - (self.base_spec.new_tokens or 0)

        def make_spec(length: int, accumulation: int) -> TargetSpec:
            return run.plan.make_spec(self.base_spec.edit(context_length=length), run.micro_batch, accumulation)

        format_label = "context {:,}".format

        def find_limit(accumulation: int) -> LargestFit:
            build_spec = functools.partial(make_spec, accumulation=accumulation)
            return self.simulator.find_run_limit(
                build_spec, format_label, run.accumulation, start=current_length, high=high, step_size=CONTEXT_STEP
            )

        # The second micro-batch takes as much as later ones: the limit is found with two, and confirmed with all.
        num_micro_batches = min(run.accumulation, 2)
        limit = find_limit(num_micro_batches)
        if limit.largest and num_micro_batches < run.accumulation:
            spec = make_spec(limit.largest, run.accumulation)
            if not self.simulator.run(spec, format_label(limit.largest), run.accumulation).fits:
                return find_limit(run.accumulation)
        return limit

    def _find_micro_batch(self, first: PlanRun, best: PlanRun | None) -> PlanRun:
        """Return the quickest run of a plan over fitting micro-batch sizes; stop if no size can be quicker than `best`.

        `first` is the plan's run at the smallest micro-batch, which fits.
        """
        sizes, plan, best_run = self.list_micro_batches(), first.plan, first
        low, high = 0, len(sizes)
        while high - low > 1 and len(self.simulator) < MAX_SEARCH_RUNS and not self._cannot_be_quicker(best_run, best):
            middle = self._guess_size(plan, sizes, low, high)
            run = self.run_plan(plan, sizes[middle])
            if run is None:
                break
            if run.outcome.fits:
                low, best_run = middle, self._choose_better(best_run, run) or best_run
            else:
                high = middle
        return best_run

    def _guess_size(self, plan: Plan, sizes: list[int], low: int, high: int) -> int:
        """Return the index in `sizes` to try next: the largest that fits by extrapolation of two runs, or `low` + 1."""
        known_outcomes = sorted((size, one.outcome) for (of, size), one in self.run_by_plan.items() if of == plan)[-2:]
        if len(known_outcomes) < 2:
            return low + 1
        (one, small_outcome), (large_size, large_outcome) = known_outcomes
        bytes_per_sequence = (large_outcome.needed_bytes - small_outcome.needed_bytes) / (large_size - one)
        if bytes_per_sequence <= 0:
            return high - 1
        max_size = one + (self.simulator.gpu.total_bytes - small_outcome.needed_bytes) / bytes_per_sequence
        fitting_indices = [index for index in range(low + 1, high) if sizes[index] <= max_size]
        return max(fitting_indices, default=low + 1)

    def _cannot_be_quicker(self, run: PlanRun, best: PlanRun | None) -> bool:
        """Return whether the FLOPs and transfers of `run`, at any micro-batch, take longer than the step of `best`."""
        step = run.outcome.step
        if best is None or step is None:
            return False
        peak_rate = max(self.simulator.gpu.peak_flops.values(), default=0)
        half_rate = self.simulator.gpu.peak_flops.get(run.plan.half, peak_rate)
        min_seconds = (step.operations / half_rate if half_rate else 0.0) + step.bus_seconds
        return min_seconds > best.outcome.seconds * (1 - TIE_TOLERANCE)

    @staticmethod
    def _choose_better(first: PlanRun | None, second: PlanRun | None) -> PlanRun | None:
        """Return the quicker of two runs that fit; of equally quick runs, the one with less memory."""
        if first is None or second is None:
            return first or second
        quickest = min(first.outcome.seconds, second.outcome.seconds)
        quickest_runs = [run for run in (first, second) if run.outcome.seconds <= quickest * (1 + TIE_TOLERANCE)]
        return min(quickest_runs, key=lambda run: run.outcome.needed_bytes)
