"""Steps whose batches differ in length: the memory of each step, and the growth of reserved memory over steps."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from memprof.allocator import AllocatorConfig, GpuReplay, TraceReplay
from memprof.fixes.catalog import EXPANDABLE_SEGMENTS
from memprof.ledger.steps import TrainingStep
from memprof.trace.events import Trace

MIN_STEPS = 5  # fewest steps of a program that are compared
MIN_SPREAD = 0.05  # of the highest peak of a step


@dataclass(frozen=True, slots=True)
class BatchStep:
    """One training step; sizes are bytes."""

    step: int  # From 1.
    # Tokens per sequence of the longest of the step's batches, padding included. None: a program's own batches.
    sequence_length: int | None
    peak_allocated_bytes: int
    reserved_bytes: int  # Peak within the step.
    unused_bytes: int  # Reserved memory beyond the peak of allocated memory in all steps so far.


@dataclass(frozen=True, slots=True)
class ReservedOverSteps:
    """The reserved peak of each step, summarized over all steps; sizes are bytes."""

    how: str
    peak_bytes: int
    p99_bytes: int  # 99% of the steps reserve at most this much, linearly interpolated.
    mean_bytes: int
    settled_step: int  # The step from which reserved memory grows no more.


@dataclass(frozen=True, slots=True)
class Batches:
    """The memory of a run whose batches differ in length."""

    lengths: str | None  # As in `--lengths`; None, as the next two: a program's own batches.
    mean_length: float | None  # Of a batch, padding included.
    longest: int | None
    steps: tuple[BatchStep, ...]
    # For the run itself; with expandable segments; with the cache released after each step.
    reserved: tuple[ReservedOverSteps, ...]


def may_be_larger(batches: Batches) -> bool:
    """Return whether a later batch of the program may be larger than those of its steps: their peaks differ by
    MIN_SPREAD, and most are not alike, as those of optimizers that take turns are. The first step has no optimizer
    state yet."""
    if batches.lengths is not None:
        return False
    peaks = [step.peak_allocated_bytes for step in batches.steps[1:]]
    return max(peaks) - min(peaks) >= MIN_SPREAD * max(peaks) and 2 * len(set(peaks)) > len(peaks)


def build_batches(
    run: GpuReplay, allocated: Sequence[int], program_steps: Sequence[TrainingStep] = ()
) -> Batches | None:
    """Return the memory of each step of a run, also under other allocator settings; None if all batches are equal.

    `allocated` has the allocated bytes after every event; `program_steps` are the training steps of a user's program.
    """
    target = run.trace.facts.target
    if target is not None and target.asked.lengths is not None and target.sequence_lengths:
        lengths, batches_per_step = target.sequence_lengths, target.asked.gradient_accumulation + target.asked.evaluate
        spans = list(_iterate_steps(run.trace))
        longest = [max(lengths[(step - 1) * batches_per_step : step * batches_per_step]) for step, _, _ in spans]
        return _build_from_steps(
            run, allocated, spans, longest, (target.asked.lengths, statistics.fmean(lengths), max(lengths))
        )
    # The first step has no optimizer state yet.
    if len(program_steps) < MIN_STEPS or run.rounds is False or len({s.peak_bytes for s in program_steps[1:]}) == 1:
        return None
    spans = [(step.step, step.begin, step.end) for step in program_steps]
    return _build_from_steps(run, allocated, spans, [None] * len(spans), (None, None, None))


def _build_from_steps(
    run: GpuReplay,
    allocated: Sequence[int],
    spans: Sequence[tuple[int, int, int]],
    longest: Sequence[int | None],
    length_summary: tuple[str | None, float | None, int | None],
) -> Batches:
    reserved_peaks = [max(run.timeline.reserved[begin:end]) for _, begin, end in spans]
    peaks = [max(allocated[begin:end]) for _, begin, end in spans]
    steps = (
        BatchStep(step, length, peak, reserved, reserved - peak_so_far)
        for (step, _, _), length, peak, reserved, peak_so_far in zip(
            spans, longest, peaks, reserved_peaks, accumulate(peaks, max), strict=True
        )
    )
    settings = [_summarize("baseline", reserved_peaks)]
    if run.rounds:
        if not run.config.expandable_segments and run.has_expandable_segments:
            expandable = dataclasses.replace(run.config, expandable_segments=True)
            settings.append(_summarize(EXPANDABLE_SEGMENTS, _replay_step_peaks(run, spans, expandable)))
        settings.append(
            _summarize("empty_cache() after each step", _replay_step_peaks(run, spans, run.config, empties_cache=True))
        )
    return Batches(*length_summary, tuple(steps), tuple(settings))


def _iterate_steps(trace: Trace) -> Iterator[tuple[int, int, int]]:
    """Yield the number, the first event and the end (exclusive) of each step."""
    begins: dict[int, int] = {}
    for time, phase in trace.list_phase_begins():
        if phase.step:
            begins.setdefault(phase.step, time)
    for (step, begin), (_, end) in pairwise([*begins.items(), (0, len(trace.events))]):
        yield step, begin, end


def _replay_step_peaks(
    run: GpuReplay, spans: Sequence[tuple[int, int, int]], config: AllocatorConfig, empties_cache: bool = False
) -> list[int]:
    """Return the reserved peak in each step on a GPU of unlimited memory, under the allocator settings `config`."""
    replay = TraceReplay(run.trace, None, config, run.release)
    peaks = []
    for _, begin, end in spans:
        replay.advance(end)
        peaks.append(max(replay.timeline.reserved[begin:end]))
        if empties_cache:
            replay.allocator.empty_cache()
    return peaks


def _summarize(how: str, reserved: Sequence[int]) -> ReservedOverSteps:
    p99 = statistics.quantiles(reserved, n=100, method="inclusive")[98] if len(reserved) > 1 else reserved[0]
    settled_step = reserved.index(max(reserved)) + 1
    return ReservedOverSteps(how, max(reserved), round(p99), round(statistics.fmean(reserved)), settled_step)
