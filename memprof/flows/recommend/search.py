"""The configuration for a model, a goal and a card, found by simulated runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from memprof.command_line import profile_command
from memprof.errors import MemprofError, UsageError
from memprof.flows.cards import device_facts, virtual_card
from memprof.flows.recommend import cards, snippet
from memprof.flows.recommend.outcome import SimulatedRun
from memprof.flows.recommend.plans import Activations, Goal, Plan, base_spec, tiers
from memprof.flows.recommend.simulator import Simulator
from memprof.remedies.catalog import check_installed
from memprof.report.documents.recommendation import Alternative, Bound, Choice, Recommendation
from memprof.spec import TargetSpec
from memprof.units import format_bytes

GRAIN = 256
"""Context lengths are searched in steps of so many tokens."""
MAX_CONTEXT = 1 << 20
"""Of a model without a limit of its own."""
MAX_BATCH = 1 << 14
TIE = 0.005
"""Steps whose times differ by less are equally fast: the one that needs less memory is taken."""
SCREENED = 14
"""Runs that a search may take before it settles; the limits, the check and the alternatives come on top."""
DEFAULT_EFFECTIVE_BATCH = 8


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of a search.

    Attributes:
        goal: what is to be done.
        effective_batch: sequences in an optimizer step; of inference, sequences at a time. None: 8, or `micro_batch` if
            that is given (inference: 1).
        precision: half, amp, float32, int8 or nf4 alone.
        micro_batch: this micro-batch alone.
        half: the half precision; None: the card's.
    """

    goal: Goal
    effective_batch: int | None = None
    precision: str | None = None
    micro_batch: int | None = None
    half: str | None = None

    @property
    def batch(self) -> int:
        """The effective batch, also where it is not given."""
        default = 1 if self.goal is Goal.INFER else DEFAULT_EFFECTIVE_BATCH
        return self.effective_batch or self.micro_batch or default


@dataclass(frozen=True, slots=True)
class Tried:
    """A plan at a micro-batch, and what came of it."""

    plan: Plan
    micro_batch: int
    accumulation: int
    outcome: SimulatedRun


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to; `chosen` is None if nothing fits, and `least` then needs least."""

    chosen: Tried | None
    least: Tried | None
    tried: tuple[Tried, ...]


class Search:
    """Searches the configurations of a goal; `base` names model, context length and card."""

    def __init__(self, runs: Simulator, base: TargetSpec, question: Question) -> None:
        self.runs = runs
        self.goal, self.effective_batch, self.micro_batch = question.goal, question.batch, question.micro_batch
        self.base = base_spec(self.goal, base)
        self.tiers = self._installed(tiers(self.goal, runs.gpu, question.precision, question.half))
        self.refused: set[str] = set()
        """Remedies that do not apply to this model."""
        self.tried: dict[tuple[Plan, int], Tried] = {}

    def _installed(self, kinds: list[Plan]) -> list[Plan]:
        """Those whose packages are there.

        Raises:
            UsageError: none are.
        """
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

    def search(self) -> Found:
        """The quickest configuration among those that fit and give up least.

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
        return Found(best, least, tried)

    def _leanest(self, tier: Plan, micro_batch: int) -> Tried | None:
        """The kind of run with everything on that saves memory and applies to the model."""
        lean = tier.leanest()
        without = dataclasses.replace(lean, chunked_loss=False)
        for plan in dict.fromkeys(
            (
                lean,
                without,
                dataclasses.replace(lean, activations=Activations.KEPT),
                dataclasses.replace(without, activations=Activations.KEPT),
            )
        ):
            tried = self.at(plan, micro_batch)
            if tried is not None:
                return tried
        return None

    def sizes(self) -> list[int]:
        """Micro-batches in question: those that divide the effective batch."""
        if self.micro_batch is not None:
            return [self.micro_batch]
        if self.goal is Goal.INFER:
            return [self.effective_batch]
        return [size for size in range(1, self.effective_batch + 1) if self.effective_batch % size == 0]

    def at(self, plan: Plan, micro_batch: int) -> Tried | None:
        """The plan at a micro-batch; None if it does not apply: a remedy that was refused is not tried again.

        With accumulation, the gradients of earlier micro-batches are there in every later one. One micro-batch on
        gradients that zero_grad left as zeros is the same to the allocator, and takes half the time to run.
        """
        key = plan, micro_batch
        if not self.refused.isdisjoint(plan.remedies):
            return None
        if key not in self.tried:
            spec, accumulation = self._asked(plan, micro_batch)
            label = plan.label(micro_batch)
            outcome = self.runs.try_run(spec, label, accumulation)
            if outcome is None:
                # The message begins with the name of the one that does not apply to this model.
                why = self.runs.failures[label]
                self.refused |= {name for name in plan.remedies if why.startswith(name)}
                return None
            self.tried[key] = Tried(plan, micro_batch, accumulation, outcome)
        return self.tried[key]

    def _asked(self, plan: Plan, micro_batch: int) -> tuple[TargetSpec, int]:
        accumulation = 1 if self.goal is Goal.INFER else max(self.effective_batch // micro_batch, 1)
        spec = plan.spec(self.base, micro_batch)
        return spec.edit(zero_grad="zero") if accumulation > 1 else spec, accumulation

    def _make(self, plans: Iterable[Plan], micro_batch: int) -> None:
        """Make the runs of these at once, but for what was refused."""
        self.runs.make(self._asked(plan, micro_batch) for plan in plans if self.refused.isdisjoint(plan.remedies))

    def confirmed(self, tried: Tried) -> Tried:
        """The same as it will be run: with its accumulation."""
        spec = tried.plan.spec(self.base, tried.micro_batch, tried.accumulation)
        label = f"check of {tried.plan.label(tried.micro_batch)}"
        return dataclasses.replace(tried, outcome=self.runs.run(spec, label, tried.accumulation))

    def batch_limit(self, tried: Tried) -> Bound:
        """The largest micro-batch of this configuration."""
        accumulation = min(tried.accumulation, 2)
        return self.runs.limit(
            lambda size: tried.plan.spec(self.base, size, accumulation),
            tried.plan.label,
            tried.accumulation,
            begin=tried.micro_batch,
            high=MAX_BATCH,
        )

    def context_limit(self, tried: Tried, longest: int | None) -> Bound:
        """The longest context of this configuration, in steps of GRAIN tokens; it has fitted at its own.

        `longest` is the model's; what is asked for beyond it is looked at beyond it.
        """
        now = tried.outcome.target.context_length or 0
        high = MAX_CONTEXT
        if longest is not None and now <= longest - (self.base.new_tokens or 0):
            high = longest - (self.base.new_tokens or 0)

        def spec_of(length: int, accumulation: int) -> TargetSpec:
            return tried.plan.spec(self.base.edit(context_length=length), tried.micro_batch, accumulation)

        def label(length: int) -> str:
            return f"context {length:,}"

        def limit(accumulation: int) -> Bound:
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
        """The best of a plan: up to the largest micro-batch that fits, unless it cannot be quicker than what there is.

        `first` is the plan at the smallest micro-batch, which fits, and `best` the quickest so far.
        """
        sizes, plan, found = self.sizes(), first.plan, first
        low, high = 0, len(sizes)
        while high - low > 1 and len(self.runs) < SCREENED and not self._hopeless(found, best):
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
        """Which size to try: the largest by what a sequence takes, if two sizes are known; else the next."""
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

    def _hopeless(self, first: Tried, best: Tried | None) -> bool:
        """No micro-batch of this plan can be quicker than `best`: operations and transfers alone take as long."""
        step = first.outcome.step
        if best is None or step is None:
            return False
        rate = max(self.runs.gpu.peak_flops.values(), default=0)
        half = self.runs.gpu.peak_flops.get(first.plan.half, rate)
        least = (step.operations / half if half else 0.0) + step.bus_seconds
        return least > best.outcome.seconds * (1 - TIE)

    @staticmethod
    def _better(one: Tried | None, other: Tried | None) -> Tried | None:
        """The quicker of two that fit; of equally quick ones, that which needs less."""
        if one is None or other is None:
            return one or other
        quickest = min(one.outcome.seconds, other.outcome.seconds)
        near = [tried for tried in (one, other) if tried.outcome.seconds <= quickest * (1 + TIE)]
        return min(near, key=lambda tried: tried.outcome.needed_bytes)


def recommend(
    spec: TargetSpec, question: Question, progress: Callable[[str], None]
) -> tuple[Recommendation, Search, Found]:
    """The configuration for `spec`'s model, at its context length and on its card, with its limits and code to paste.

    Raises:
        MemprofError: the model cannot be found, or no way to run the goal applies to it.
    """
    gpu = virtual_card(spec)
    runs = Simulator(gpu, progress)
    goal, batch = question.goal, question.batch
    search = Search(runs, spec, question)
    if goal is Goal.INFER and search.at(search.tiers[0], batch) is None:
        # It does not decode: its forward alone.
        runs.failures.clear()
        search.base = search.base.edit(new_tokens=None)
    found = search.search()
    if not found.tried:
        if runs.refusal is not None and set(runs.failures.values()) == {runs.refusal.line}:  # it is not about the goal
            raise runs.refusal
        label, why = next(iter(runs.failures.items()))
        raise MemprofError(f"the goal {goal.value} cannot be run with this model", value=f"{label}: {why}")
    chosen = None if found.chosen is None else search.confirmed(found.chosen)
    if chosen is not None and not chosen.outcome.fits:
        # Only where zeros instead of no gradients made the difference: what is leaner is checked in turn.
        rest = sorted((one for one in found.tried if one.outcome.fits), key=lambda one: one.outcome.needed_bytes)
        chosen = next((one for one in map(search.confirmed, rest) if one.outcome.fits), None)
    example = chosen or found.least
    assert example is not None
    target = example.outcome.target
    batch_limit = context = None
    alternatives: tuple[Alternative, ...] = ()
    if chosen is not None:
        limits = [functools.partial(search.batch_limit, chosen)]
        if target.vocab_size is not None:
            limits.append(functools.partial(search.context_limit, chosen, target.max_positions))
        batch_limit, context = [*runs.searches([functools.partial(_ask, limit) for limit in limits]), None][:2]
    else:
        alternatives = cards.alternatives(search, example)
    rows = _choices(runs, found.tried, chosen)
    answer = Recommendation(
        device=device_facts(gpu, spec.host_memory_bytes),
        goal=goal.value,
        model=target.model,
        num_parameters=target.num_parameters,
        context_length=target.context_length or 0,
        effective_batch=batch,
        chosen=rows[0] if chosen is not None else None,
        reason=_reason(chosen, found, search),
        choices=rows,
        batch=batch_limit,
        context=context,
        max_positions=target.max_positions,
        alternatives=alternatives,
        snippets={} if chosen is None else snippet.snippets(chosen.plan, chosen.outcome.spec, chosen.accumulation),
        runs=len(runs),
        not_applied=dict(runs.failures),
        card_note=gpu.note,
        assumptions=_assumptions(question, spec),
    )
    return answer, search, dataclasses.replace(found, chosen=chosen)


def _ask(limit: Callable[[], Bound], runs: Simulator) -> Bound:
    """A search asks the simulator that it has."""
    return limit()


def _choices(runs: Simulator, tried: tuple[Tried, ...], chosen: Tried | None) -> tuple[Choice, ...]:
    """All that were run, the chosen one first, then by time of a step."""
    rest = [one for one in tried if chosen is None or (one.plan, one.micro_batch) != (chosen.plan, chosen.micro_batch)]
    rest.sort(key=lambda one: (not one.outcome.fits, one.outcome.seconds, one.outcome.needed_bytes))
    ordered = [*([chosen] if chosen is not None else []), *rest]
    points = [(one.outcome.needed_bytes, one.outcome.seconds) for one in ordered]
    return tuple(
        choice_of(runs, one, pareto=on_front(point, points)) for one, point in zip(ordered, points, strict=True)
    )


def on_front(point: tuple[int, float], points: list[tuple[int, float]]) -> bool:
    """Whether no other needs less memory and less time."""
    return not any(
        other != point and other[0] <= point[0] and other[1] <= point[1] * (1 - TIE if other[0] == point[0] else 1)
        for other in points
    )


def choice_of(runs: Simulator, tried: Tried, *, pareto: bool) -> Choice:
    """The row of what was run."""
    plan, outcome, step = tried.plan, tried.outcome, tried.outcome.step
    settings = {
        "precision": plan.precision if plan.precision not in ("half", "amp") else f"{plan.precision} ({plan.half})",
        "optimizer": plan.optimizer,
        "activations": plan.activations.value,
        "chunked_loss": plan.chunked_loss,
        "attention": outcome.spec.attention,
        "alloc_conf": outcome.spec.alloc_conf,
    }
    return Choice(
        name=plan.label(),
        settings=settings,
        command=profile_command(outcome.spec),
        micro_batch=tried.micro_batch,
        accumulation=tried.accumulation,
        needed_bytes=outcome.needed_bytes,
        host_bytes=outcome.host_bytes,
        margin_bytes=runs.gpu.total_bytes - outcome.needed_bytes,
        fits=outcome.fits,
        step_seconds=None if step is None else step.seconds,
        compute_seconds=None if step is None else step.compute_seconds,
        bus_seconds=None if step is None else step.bus_seconds,
        link_seconds=None if step is None else step.link_seconds,
        given_up=plan.given_up,
        pareto=pareto,
        dies_in=outcome.dies_in,
    )


def _reason(chosen: Tried | None, found: Found, search: Search) -> str:
    if chosen is None:
        assert found.least is not None
        return f"nothing fits: the least that any way needs is with {found.least.plan.label(found.least.micro_batch)}"
    fitting = [one for one in found.tried if one.outcome.fits and one.plan.given_up == chosen.plan.given_up]
    what = "gives up no precision" if not chosen.plan.given_up else f"gives up: {chosen.plan.given_up}"
    kinds = [(tier.precision, tier.optimizer) for tier in search.tiers]
    earlier = search.tiers[: kinds.index((chosen.plan.precision, chosen.plan.optimizer))]
    gives_less = any(tier.given_up != chosen.plan.given_up for tier in earlier)
    no_less = "; what gives up less does not fit" if gives_less else ""
    if len(found.tried) == 1:
        return f"the first that was run, and it fits; it {what}"
    if len(fitting) == 1:
        return f"the only one of {len(found.tried)} that were run that fits; it {what}{no_less}"
    return f"the quickest of {len(fitting)} that fit; it {what}{no_less}"


def _assumptions(question: Question, spec: TargetSpec) -> tuple[str, ...]:
    found = [
        "Times are lower bounds at the card's published rates: compute and transfers one after the other. They rank "
        "configurations; real kernels reach a part of these rates.",
        f"Context lengths are searched in steps of {GRAIN} tokens, batches one by one.",
    ]
    if spec.host_memory_bytes is not None:
        found.append(f"The machine has {format_bytes(spec.host_memory_bytes)} of host memory (--host-memory).")
    if question.goal is not Goal.INFER:
        found.append(
            "Of more than two micro-batches in a step two are run: each after the second finds what the second found. "
            "Of what is not chosen the second alone, on gradients that zero_grad left as zeros."
        )
        if question.effective_batch is None:
            found.append(f"{question.batch} sequences in an optimizer step (no --effective-batch was given).")
    return tuple(found)
