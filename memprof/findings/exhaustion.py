"""Prediction of the training step in which growing memory runs out, by a replay of the recorded steps.

Steps are assumed to differ only in the tensors that they leak. To test a step, the replay allocates the state after the
last recorded step, the tensors that later steps leak, and repeats the events of the recorded step that needs the most
memory. Bisection finds the first step with a failed allocation.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from memprof.findings.effect import compute_needs_of
from memprof.findings.finding import Context, cache_per_context
from memprof.findings.growth import MIN_STEP_BYTES, LeakGroup, find_step_leaks
from memprof.ledger.steps import TrainingStep, list_training_steps
from memprof.trace.events import Event, EventKind, Holder, Trace

MAX_STEPS = 1_000_000  # Runs have fewer steps: if memory lasts longer, it does not run out

TOLERANCE = 0.01  # of the predicted step: bisection ends at this precision


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of GPU memory over training steps, and the step in which memory runs out."""

    bytes_per_step: int  # Leaked bytes per step, as in the findings.
    peak_bytes_per_step: int  # Growth of the peak per step: twice that, if the old and the new are live together.
    steps_seen: int  # Number of recorded training steps.
    # Total number of training steps of the program, recorded or inferred from its loops; None: not known.
    program_steps: int | None
    # Predicted step with the first failed allocation; None: after `MAX_STEPS`, or the growth is limited and fits.
    runs_out_step: int | None

    @property
    def runs_out(self) -> bool:
        """Return whether memory runs out before the program ends."""
        if self.runs_out_step is None:
            return False
        return self.program_steps is None or self.program_steps >= self.runs_out_step


@cache_per_context
def predict_growth(context: Context) -> Growth | None:
    """Return the growth of memory and the step in which memory runs out; None if memory does not grow, the GPU's size
    is not known, or memory has run out already."""
    ledger, usable_bytes = context.ledger, context.usable_bytes
    if usable_bytes is None or ledger.out_of_memory is not None or ledger.trace.facts.command == "profile":
        return None
    steps = list_training_steps(ledger.trace, ledger.allocated)
    leaks = _forecast_leaks(context, steps)
    per_step = sum(leak.group.bytes_each for leak in leaks)
    if per_step < MIN_STEP_BYTES:
        return None
    peak_per_step = _compute_peak_growth(steps[1:], leaks, per_step)
    runs_out = _predict_failing_step(context, steps, leaks, peak_per_step)
    program = ledger.trace.facts.program
    ran_to_end = program is None or program.ended == "exit"
    planned = steps[-1].step if program is None or ran_to_end else program.planned_steps
    if runs_out is not None and runs_out > MAX_STEPS:
        runs_out = None
    return Growth(per_step, peak_per_step, len(steps), planned, runs_out)


@dataclass(frozen=True, slots=True)
class _Forecast:
    """A leak, and the sizes of the tensors that steps after the recorded ones add to it."""

    group: LeakGroup
    sizes: tuple[tuple[int, ...], ...]  # tensor sizes added by each recorded step but the first; later steps cycle
    last_step: int | None  # the step at which the holder is full; None: the holder has no maximum length

    def get_added_sizes(self, step: int, last_seen_step: int) -> tuple[int, ...]:
        """Return the sizes in bytes of the tensors that `step` adds; the last recorded step is `last_seen_step`."""
        if self.last_step is not None and step > self.last_step:
            return ()
        return self.sizes[(step - last_seen_step - 1) % len(self.sizes)]


def _forecast_leaks(context: Context, steps: Sequence[TrainingStep]) -> list[_Forecast]:
    """Return a forecast for each leak; a leak ends when its holder reaches its maximum length."""
    storages, births = context.ledger.trace.storages, context.lifetimes.births
    step_ends = [step.end - 1 for step in steps]
    forecasts = []
    for holder, leaks in find_step_leaks(context).items():
        for leak in leaks:
            by_step: dict[int, list[int]] = defaultdict(list)
            for index in leak.storages:
                by_step[bisect.bisect_left(step_ends, births[index])].append(storages[index].num_bytes)
            if leak.is_recreated:
                sizes: tuple[tuple[int, ...], ...] = ((leak.bytes_each,),)
            else:
                sizes = tuple(tuple(by_step[step]) for step in range(1, len(steps)))
            full_step = None if holder is None else _find_full_step(holder, leak, step_ends)
            if full_step is None or full_step > len(steps):
                forecasts.append(_Forecast(leak, sizes, full_step))
    return forecasts


def _find_full_step(holder: Holder, leak: LeakGroup, step_ends: Sequence[int]) -> int | None:
    """Return the step at which `holder` has as many items as it can have; None if there is no maximum."""
    if holder.limit is None:
        return None
    if holder.length:  # when it was found; an item may have many tensors
        num_steps, num_items = max(bisect.bisect_left(step_ends, holder.event), 1), holder.length
    else:
        num_steps, num_items = len(step_ends), max(len(leak.storages), 1)
    return math.ceil(holder.limit * num_steps / num_items)


def _compute_peak_growth(later: Sequence[TrainingStep], leaks: Sequence[_Forecast], per_step: int) -> int:
    """Return the bytes by which the peak grows per step, of steps after the first that leak `per_step` bytes each."""
    if not any(leak.group.is_recreated for leak in leaks):
        return per_step
    # The old and the new are live together, perhaps at the peak.
    rises = sorted(after.peak_bytes - before.peak_bytes for before, after in pairwise(later))
    return min(max(rises[len(rises) // 2] if rises else 0, per_step), 2 * per_step)


def _predict_failing_step(
    context: Context, steps: Sequence[TrainingStep], leaks: Sequence[_Forecast], growth_per_step: int
) -> int | None:
    """Return the first step with a failed allocation if the peak grows by `growth_per_step` bytes; None: none fails."""
    last_seen_step = steps[-1].step
    usable_bytes = context.usable_bytes or 0
    per_step = sum(leak.group.bytes_each for leak in leaks)
    allocated = context.ledger.allocated
    later = steps[1:]
    # The peak of each step, plus the bytes that the steps after it leak.
    peak_needs = [max(allocated[s.begin : s.end]) + per_step * (len(later) - i) for i, s in enumerate(later, 1)]
    worst_index = max(range(len(later)), key=peak_needs.__getitem__)
    last_candidate = last_seen_step + 1 + max(usable_bytes - peak_needs[worst_index], 0) // growth_per_step
    last_steps = [leak.last_step for leak in leaks]
    if None not in last_steps:
        last_candidate = min(last_candidate, max(limit for limit in last_steps if limit is not None) + 1)
    if last_candidate > MAX_STEPS or growth_per_step != per_step:
        return last_candidate
    continuation = _Continuation(context, later[worst_index], leaks, steps[-1])
    return _bisect_failing_step(continuation, last_seen_step + 1, last_candidate + 1)


def _bisect_failing_step(continuation: _Continuation, first: int, last: int) -> int | None:
    """Return the first step from `first` to `last` with a failed allocation, to within `TOLERANCE`, or None."""
    if continuation.fits_until(last):
        return None
    fitting, failing = first - 1, last
    near_last = first + int(0.9 * (last - first))
    if first < near_last < last:
        fitting, failing = (near_last, last) if continuation.fits_until(near_last) else (fitting, near_last)
    while failing - fitting > max(1, int(TOLERANCE * failing)):
        middle = (fitting + failing) // 2
        fitting, failing = (middle, failing) if continuation.fits_until(middle) else (fitting, middle)
    return failing


@dataclass(frozen=True, slots=True)
class _Continuation:
    """A recorded trace, continued by steps that only allocate their leaked tensors, and by one complete step."""

    context: Context
    template_step: TrainingStep  # its events are repeated as the complete step
    leaks: Sequence[_Forecast]
    last_step: TrainingStep  # last recorded step

    def fits_until(self, step: int) -> bool:
        """Return whether all allocations succeed up to the end of `step`."""
        base = self.context.ledger.trace
        trace = dataclasses.replace(base, events=list(base.events), storages=list(base.storages))
        template_storage = trace.storages[self.leaks[0].group.storages[0]]
        for later_step in range(self.last_step.step + 1, step):
            for leak in self.leaks:
                for num_bytes in leak.get_added_sizes(later_step, self.last_step.step):
                    trace.events.append(Event(EventKind.ALLOC, len(trace.storages)))
                    trace.storages.append(template_storage._replace(num_bytes=num_bytes))
        trace.events += self._make_step_events(trace)
        return compute_needs_of(self.context, trace).fits

    def _make_step_events(self, trace: Trace) -> Iterator[Event]:
        """Yield the events of the template step for a new step; its storages are appended to `trace`."""
        lifetimes, template_step = self.context.lifetimes, self.template_step
        new_indices: dict[int, int] = {}
        remaining_storages = self._find_remaining_storages()
        for kind, index in self.context.ledger.trace.events[template_step.begin : template_step.end]:
            if kind is EventKind.ALLOC:
                new_indices[index] = len(trace.storages)
                trace.storages.append(trace.storages[index])
                yield Event(kind, new_indices[index])
            elif kind is EventKind.FREE:
                if index in new_indices:
                    yield Event(kind, new_indices.pop(index))
                elif lifetimes.births[index] < template_step.begin:
                    storage = trace.storages[index]
                    if candidates := remaining_storages[storage.num_bytes, storage.op]:
                        yield Event(kind, candidates.pop(0))  # the counterpart left by the step before
            else:
                yield Event(kind, index)

    def _find_remaining_storages(self) -> Mapping[tuple[int, int], list[int]]:
        """Return (size, operator) -> storages of the last step that stay live at its end and are not leaked."""
        lifetimes, trace = self.context.lifetimes, self.context.ledger.trace
        end = len(trace.events)
        leaked = {index for leak in self.leaks for index in leak.group.storages}
        remaining: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, storage in enumerate(trace.storages):
            if self.last_step.begin <= lifetimes.births[index] < end <= lifetimes.deaths[index] and index not in leaked:
                remaining[storage.num_bytes, storage.op].append(index)
        return remaining
