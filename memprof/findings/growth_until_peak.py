"""Growth that ends: tensors accumulate over the rounds before the peak of a run, and are freed together after it.

Examples are a list that is filled in each step and cleared at the end of the epoch, a hidden state that keeps the
graphs of all micro-batches of a step, and a sum of losses that is differentiated only at the end. Rounds are training
steps, else backward passes (one per micro-batch), else calls of the model with gradients: the first of these over which
tensors grow. What keeps growing to the end of a run is `growth.find_step_leaks`.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from memprof.findings.evidence import is_input
from memprof.findings.finding import Context, cache_per_context
from memprof.findings.growth import (
    MIN_RISES,
    Key,
    LeakGroup,
    by_holder,
    compute_curve,
    compute_median_rise,
    count_idle_iterations,
    find_step_leaks,
    is_growing,
    make_key,
)
from memprof.ledger.steps import list_training_steps
from memprof.trace.events import Holder, PhaseKind, Trace

MIN_SHARE = 0.05  # of the peak: what accumulates less does not decide it

STEP, BACKWARD_PASS, CALL = "step", "backward pass", "call"


@dataclass(frozen=True, slots=True)
class GrowthUntilPeak:
    """Tensors that accumulate over the rounds before the peak."""

    unit: str  # name of a round: STEP, BACKWARD_PASS or CALL
    rounds: int  # number of rounds over which they accumulate
    ends: list[int]  # last event of each round of the run
    leaks: dict[Holder | None, list[LeakGroup]]  # by holder; their storages are live at the peak

    @property
    def units(self) -> str:
        """Return the name of several rounds."""
        return self.unit + ("es" if self.unit == BACKWARD_PASS else "s")


@cache_per_context
def find_growth_until_peak(context: Context) -> GrowthUntilPeak | None:
    """Return the growth over the first kind of rounds that has any; None if there is none, or it is small."""
    ledger, trace = context.ledger, context.ledger.trace
    reported = {leak.key for leaks in find_step_leaks(context).values() for leak in leaks}
    # Counterparts that are freed before the peak tell whether tensors replace each other, or accumulate.
    members: dict[Key, list[int]] = defaultdict(list)
    for index, storage in enumerate(trace.storages):
        if (
            (index not in trace.owners or is_input(trace, index))
            and not storage.hidden
            and storage.device == trace.device
        ):
            members[make_key(trace, index)].append(index)
    for key in reported:
        members.pop(key, None)
    for unit, ends in _list_rounds(context):
        if len(ends) < MIN_RISES:
            continue
        stretches = [_find_stretch(context, key, own, ends) for key, own in members.items()]
        found = [stretch for stretch in stretches if stretch is not None]
        leaks = [leak for leak, _ in found]
        if leaks and sum(leak.num_bytes for leak in leaks) >= MIN_SHARE * ledger.peak_bytes:
            holders = by_holder(trace, leaks)
            if unit == CALL:
                if not any(is_input(trace, index) for leak in leaks for index in leak.storages):
                    continue  # calls without inputs of their own compute with the results of others
                # One backward frees all.
                held = (one for one in holders if one is not None and _spans_calls(context, one, ends))
                holders = {next(held, find_sum_of_calls(trace, ends)): leaks}
            elif unit == BACKWARD_PASS:
                holders = _join_states(holders)
            num_rounds = max(rounds for _, rounds in found) - _is_just_begun(context, leaks, ends)
            return GrowthUntilPeak(unit, num_rounds, ends, holders)
    return None


def _join_states(holders: dict[Holder | None, list[LeakGroup]]) -> dict[Holder | None, list[LeakGroup]]:
    """Return `holders` with the leaks of all variables whose graphs are about as large at the one with most bytes: the
    graph of each keeps nearly all tensors, so that theirs cannot be told apart."""
    states = [one for one in holders if one is not None and not one.kind and one.nodes]
    main = max(states, key=lambda one: sum(leak.num_bytes for leak in holders[one]), default=None)
    if main is None:
        return holders
    others = [one for one in states if one is not main and one.nodes * 2 >= main.nodes]
    joined = [leak for one in (main, *others) for leak in holders[one]]
    return {**holders, main: joined, **{one: [] for one in others}}


def _is_just_begun(context: Context, leaks: list[LeakGroup], ends: list[int]) -> bool:
    """Return whether the round of the peak has made less than half of what each adds: it counts as none."""
    last = bisect.bisect_left(ends, context.ledger.peak_event)
    births = context.lifetimes.births
    made = [index for leak in leaks for index in leak.storages if last and births[index] > ends[last - 1]]
    return bool(made) and 2 * context.lifetimes.sum_bytes(made) < sum(leak.bytes_each for leak in leaks)


def find_piled_up_storages(context: Context) -> frozenset[int]:
    """Return the storages that accumulate over steps or backward passes until the peak, and all that are made alike."""
    growth = find_growth_until_peak(context)
    if growth is None or growth.unit == CALL:  # calls are told only where the run does not fit
        return frozenset()
    trace, keys = context.ledger.trace, {leak.key for leaks in growth.leaks.values() for leak in leaks}
    return frozenset(index for index in range(len(trace.storages)) if make_key(trace, index) in keys)


def list_growth_holders(context: Context) -> list[Holder]:
    """Return what keeps the tensors that accumulate, over training steps or until the peak."""
    until_peak = find_growth_until_peak(context)
    holders = [*find_step_leaks(context), *([] if until_peak is None else until_peak.leaks)]
    return [holder for holder in holders if holder is not None]


def _list_rounds(context: Context) -> Iterator[tuple[str, list[int]]]:
    """Yield (unit, last event of each round), the longest rounds first."""
    trace = context.ledger.trace
    yield STEP, [step.end - 1 for step in list_training_steps(trace, context.ledger.allocated)]
    ends = {
        (phase.step, phase.micro_batch): end - 1
        for (_, phase), (end, _) in pairwise(context.phases)
        if phase.kind is PhaseKind.BACKWARD
    }
    yield BACKWARD_PASS, sorted(ends.values())
    # Only where memory runs out: several calls may need one backward, as in a loop over the parts of a sequence.
    # Where the program's own code does not train, no backward is to come.
    if not context.ledger.run.fits and trace.may_train:
        modules = [forward.module for forward in trace.forwards if forward.nodes and forward.training]
        for module, _ in Counter(modules).most_common(1):
            yield CALL, [forward.end - 1 for forward in trace.forwards if forward.nodes and forward.module == module]


def _spans_calls(context: Context, holder: Holder, ends: list[int]) -> bool:
    """Return whether `holder`, as it was found, has tensors of most calls before, unlike the weights that a step of one
    task has made; a variable has one tensor."""
    calls = {bisect.bisect_left(ends, context.lifetimes.births[index]) for index in holder.storages}
    return not holder.kind or 2 * len(calls) > bisect.bisect_left(ends, holder.event)


def find_sum_of_calls(trace: Trace, ends: list[int]) -> Holder | None:
    """Return the variable whose graph has the most nodes, of those that were found after the last of the calls."""
    sums = [holder for holder in trace.holders if not holder.kind and holder.nodes and holder.event > ends[-1]]
    return max(sums, key=lambda holder: holder.nodes, default=None)


def _find_stretch(context: Context, key: Key, members: list[int], ends: list[int]) -> tuple[LeakGroup, int] | None:
    """Return the leak of `members` since they last became fewer before the peak, and the number of its rounds.

    None if they do not accumulate, or if most of them stay after the peak: a cache that is full, a window.
    """
    lifetimes, peak = context.lifetimes, context.ledger.peak_event
    curve = compute_curve(context, members, ends, survivors_only=True)
    last = bisect.bisect_left(ends, peak)  # the round of the peak
    first = max((i for i in range(1, last) if curve[i] < curve[i - 1]), default=0)
    stretch = curve[first:last]
    born = [index for index in members if lifetimes.births[index] <= peak]
    if not born:
        return None
    num_idle = max(count_idle_iterations(context, born, ends[:last]), 0)
    following = curve[last + 1 : last + 2]
    if (
        sum(after > before for before, after in pairwise(stretch)) < MIN_RISES
        or not is_growing(stretch, num_idle)
        or (following and 2 * following[0] > stretch[-1])
    ):
        return None
    live = lifetimes.find_live(peak, members).storages
    rounds = {bisect.bisect_left(ends, lifetimes.births[index]) for index in live}
    return LeakGroup(key, live, stretch[-1] - stretch[0], compute_median_rise(stretch)), len(rounds)
