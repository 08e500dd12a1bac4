"""Prediction of the training step in which growing memory runs out, from the recorded steps, by a replay.

Steps are alike except for the tensors that they leave behind. The replay allocates the state after the last step, the
tensors that later steps leave behind, and the events of the step with the highest need once more; bisection finds the
first step with a failed allocation.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from memprof.allocator import compute_memory_needs
from memprof.findings.finding import Context, cache_per_context
from memprof.findings.growth import MIN_STEP_BYTES, LeakGroup, find_step_leaks
from memprof.ledger.steps import TrainingStep, training_steps
from memprof.trace.events import Event, EventKind, Trace

MAX_STEPS = 1_000_000  # A run of more steps is not expected: what lasts longer is no verdict

TOLERANCE = 0.01  # of the predicted step: bisection ends there


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory that training steps leave behind on the GPU, and the step in which it runs out."""

    bytes_per_step: int  # What a step adds, as the findings have it.
    steps_seen: int  # Training steps that were run.
    # Training steps that the program makes in all, seen or by its loops; None: they tell of no end.
    program_steps: int | None
    # About the step in which a request would fail; None: later than `MAX_STEPS`, or what grows is limited and fits.
    runs_out_step: int | None

    @property
    def runs_out(self) -> bool:
        """Return whether memory runs out before the program ends."""
        if self.runs_out_step is None:
            return False
        return self.program_steps is None or self.program_steps >= self.runs_out_step


@cache_per_context
def predict_growth(context: Context) -> Growth | None:
    """Return a prediction of the step in which memory runs out; None if no memory grows, the size of the GPU is not
    known, or memory has run out already."""
    ledger, usable = context.ledger, context.usable_bytes
    if usable is None or ledger.out_of_memory is not None or ledger.trace.facts.command == "profile":
        return None
    steps = training_steps(ledger.trace, ledger.allocated)
    leaks = _forecast_leaks(context, steps)
    per_step = sum(leak.group.bytes_per_iteration for leak in leaks)
    if per_step < MIN_STEP_BYTES:
        return None
    runs_out = _predict_failing_step(context, steps, leaks, usable)
    program = ledger.trace.facts.program
    ended = program is None or program.ended == "exit"
    known = steps[-1].step if program is None or ended else program.planned_steps
    return Growth(per_step, len(steps), known, runs_out if runs_out is None or runs_out <= MAX_STEPS else None)


@dataclass(frozen=True, slots=True)
class _Forecast:
    """A group of leaks, and the bytes that later steps add to the group."""

    group: LeakGroup
    sizes: tuple[tuple[int, ...], ...]  # bytes that each step but the first has added; later steps do the same in turn
    last_step: int | None  # the step at which its holder is full; None: it has no limit

    def added_in(self, step: int, seen: int) -> tuple[int, ...]:
        """Return the sizes of the tensors that `step` adds; the trace has the first `seen` steps."""
        if self.last_step is not None and step > self.last_step:
            return ()
        return self.sizes[(step - seen - 1) % len(self.sizes)]


def _forecast_leaks(context: Context, steps: Sequence[TrainingStep]) -> list[_Forecast]:
    """Return the forecasts of all leaks; a leak ends when its holder reaches the holder's limit."""
    storages, births = context.ledger.trace.storages, context.lives.births
    ends = [step.end - 1 for step in steps]
    found = []
    for holder, groups in find_step_leaks(context).items():
        for group in groups:
            by_step: dict[int, list[int]] = defaultdict(list)
            for index in group.storages:
                by_step[bisect.bisect_left(ends, births[index])].append(storages[index].num_bytes)
            if group.is_recreated:
                sizes: tuple[tuple[int, ...], ...] = ((group.bytes_per_iteration,),)
            else:
                sizes = tuple(tuple(by_step[number]) for number in range(1, len(steps)))
            limit = None if holder is None else holder.limit
            full = None if limit is None else math.ceil(limit * len(steps) / max(len(group.storages), 1))
            if full is None or full > len(steps):
                found.append(_Forecast(group, sizes, full))
    return found


def _predict_failing_step(
    context: Context, steps: Sequence[TrainingStep], leaks: Sequence[_Forecast], usable: int
) -> int | None:
    """Return the number of the step with the first failed allocation; None if no allocation fails."""
    seen = steps[-1].step
    per_step = sum(leak.group.bytes_per_iteration for leak in leaks)
    allocated = context.ledger.allocated
    later = steps[1:]
    # What each step took at most, as if all were the last one.
    needs = [max(allocated[one.begin : one.end]) + per_step * (len(later) - at) for at, one in enumerate(later, 1)]
    worst = max(range(len(later)), key=needs.__getitem__)
    slope = per_step
    if any(leak.group.is_recreated for leak in leaks):  # the old and the new are live together, perhaps at the peak
        rises = sorted(after.peak_bytes - before.peak_bytes for before, after in pairwise(later))
        slope = min(max(rises[len(rises) // 2] if rises else 0, per_step), 2 * per_step)
    most = seen + 1 + max(usable - needs[worst], 0) // slope
    limits = [leak.last_step for leak in leaks]
    if None not in limits:
        most = min(most, max(limit for limit in limits if limit is not None) + 1)
    if most > MAX_STEPS or slope != per_step:
        return most
    continued = _Continuation(context, later[worst], leaks, steps[-1])
    return _bisect_failing_step(continued, seen + 1, most + 1)


def _bisect_failing_step(continued: _Continuation, first: int, last: int) -> int | None:
    """Return the first step from `first` to `last` with a failed allocation, to within `TOLERANCE`, or None."""
    if continued.fits(last):
        return None
    fitting, refused = first - 1, last
    near = first + int(0.9 * (last - first))
    if first < near < last:
        fitting, refused = (near, last) if continued.fits(near) else (fitting, near)
    while refused - fitting > max(1, int(TOLERANCE * refused)):
        middle = (fitting + refused) // 2
        fitting, refused = (middle, refused) if continued.fits(middle) else (fitting, middle)
    return refused


@dataclass(frozen=True, slots=True)
class _Continuation:
    """The trace, continued by steps that only allocate their leaks, and by one complete step."""

    context: Context
    template: TrainingStep  # whose events the last one has
    leaks: Sequence[_Forecast]
    last: TrainingStep  # in the record

    def fits(self, step: int) -> bool:
        """Return whether all allocations succeed up to the end of `step`."""
        run, record = self.context.ledger.run, self.context.ledger.trace
        trace = dataclasses.replace(record, events=list(record.events), storages=list(record.storages))
        like = trace.storages[self.leaks[0].group.storages[0]]
        for number in range(self.last.step + 1, step):
            for leak in self.leaks:
                for num_bytes in leak.added_in(number, self.last.step):
                    trace.events.append(Event(EventKind.ALLOC, len(trace.storages)))
                    trace.storages.append(like._replace(num_bytes=num_bytes))
        trace.events += self._make_step_events(trace)
        return compute_memory_needs(trace, run.gpu, run.config, run.release).fits

    def _make_step_events(self, trace: Trace) -> Iterator[Event]:
        """Yield the events of the template step, with new storages that are added to `trace`."""
        lives, template = self.context.lives, self.template
        renamed: dict[int, int] = {}
        left = self._find_remaining_storages()
        for kind, ref in self.context.ledger.trace.events[template.begin : template.end]:
            if kind is EventKind.ALLOC:
                renamed[ref] = len(trace.storages)
                trace.storages.append(trace.storages[ref])
                yield Event(kind, renamed[ref])
            elif kind is EventKind.FREE:
                if ref in renamed:
                    yield Event(kind, renamed.pop(ref))
                elif lives.births[ref] < template.begin:
                    storage = trace.storages[ref]
                    if same := left[storage.num_bytes, storage.op]:
                        yield Event(kind, same.pop(0))  # what the step before had left for this one
            else:
                yield Event(kind, ref)

    def _find_remaining_storages(self) -> Mapping[tuple[int, int], list[int]]:
        """Return the storages of the last step that are live at its end and are no leaks, by size and operator."""
        lives, trace = self.context.lives, self.context.ledger.trace
        end = len(trace.events)
        kept = {index for leak in self.leaks for index in leak.group.storages}
        left: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, storage in enumerate(trace.storages):
            if self.last.begin <= lives.births[index] < end <= lives.deaths[index] and index not in kept:
                left[storage.num_bytes, storage.op].append(index)
        return left
