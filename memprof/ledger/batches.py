"""Steps whose batches differ in length: what each takes, and how what is reserved grows and settles over them."""

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

FEWEST = 5  # steps of a program of which it can be said that they differ


@dataclass(frozen=True, slots=True)
class BatchStep:
    """A step; sizes in bytes."""

    step: int  # From 1.
    # Tokens per sequence of the longest of its batches, padding included. None: a program's own batches.
    sequence_length: int | None
    peak_allocated_bytes: int
    reserved_bytes: int  # At its most.
    unused_bytes: int  # What is reserved beyond the most that tensors have taken in any step so far.


@dataclass(frozen=True, slots=True)
class ReservedOverSteps:
    """The most that is reserved in a step, over all steps; sizes in bytes."""

    how: str
    peak_bytes: int
    p99_bytes: int  # 99% of the steps reserve no more, between two steps by their distance.
    mean_bytes: int
    settled_step: int  # After it nothing more is reserved than before.


@dataclass(frozen=True, slots=True)
class Batches:
    """A run over batches that differ."""

    lengths: str | None  # As `--lengths` has them; None, as the next two: a program's own batches.
    mean_length: float | None  # Of a batch, padding included.
    longest: int | None
    steps: tuple[BatchStep, ...]
    # As the run was; with expandable segments; with the cache released after each step.
    reserved: tuple[ReservedOverSteps, ...]


def batches(run: GpuReplay, allocated: Sequence[int], trained: Sequence[TrainingStep] = ()) -> Batches | None:
    """Return the batches of a run through its allocator; None if they are all alike.

    `allocated` are bytes after every event; `trained`, the steps of a program that names no phases of its own.
    """
    target = run.trace.facts.target
    if target is not None and target.asked.lengths is not None and target.sequence_lengths:
        lengths, each = target.sequence_lengths, target.asked.gradient_accumulation + target.asked.evaluate
        spans = list(_steps(run.trace))
        longest = [max(lengths[(number - 1) * each : number * each]) for number, _, _ in spans]
        return _batches(run, allocated, spans, longest, (target.asked.lengths, statistics.fmean(lengths), max(lengths)))
    # The first has no optimizer state yet.
    if len(trained) < FEWEST or run.rounds is False or len({step.peak_bytes for step in trained[1:]}) == 1:
        return None
    spans = [(step.step, step.begin, step.end) for step in trained]
    return _batches(run, allocated, spans, [None] * len(spans), (None, None, None))


def _batches(
    run: GpuReplay,
    allocated: Sequence[int],
    spans: Sequence[tuple[int, int, int]],
    longest: Sequence[int | None],
    about: tuple[str | None, float | None, int | None],
) -> Batches:
    as_run = [max(run.timeline.reserved[begin:end]) for _, begin, end in spans]
    peaks = [max(allocated[begin:end]) for _, begin, end in spans]
    steps = (
        BatchStep(number, length, peak, reserved, reserved - most)
        for (number, _, _), length, peak, reserved, most in zip(
            spans, longest, peaks, as_run, accumulate(peaks, max), strict=True
        )
    )
    rows = [_summarize("baseline", as_run)]
    if run.rounds:
        if not run.config.expandable_segments and run.release.has_expandable_segments:
            other = dataclasses.replace(run.config, expandable_segments=True)
            rows.append(_summarize(EXPANDABLE_SEGMENTS, _reserved(run, spans, other)))
        rows.append(_summarize("empty_cache() after each step", _reserved(run, spans, run.config, gives_back=True)))
    return Batches(*about, tuple(steps), tuple(rows))


def _steps(trace: Trace) -> Iterator[tuple[int, int, int]]:
    """Return each step's number, its first event, and the first that is no longer its own."""
    begins: dict[int, int] = {}
    for time, phase in trace.begun():
        if phase.step:
            begins.setdefault(phase.step, time)
    for (number, begin), (_, end) in pairwise([*begins.items(), (0, len(trace.events))]):
        yield number, begin, end


def _reserved(
    run: GpuReplay, spans: Sequence[tuple[int, int, int]], config: AllocatorConfig, gives_back: bool = False
) -> list[int]:
    """Return the most that is reserved in each step on a GPU without limit, by other settings."""
    replay = TraceReplay(run.trace, None, config, run.release)
    most = []
    for _, begin, end in spans:
        replay.advance(end)
        most.append(max(replay.timeline.reserved[begin:end]))
        if gives_back:
            replay.allocator.empty_cache()
    return most


def _summarize(how: str, reserved: Sequence[int]) -> ReservedOverSteps:
    p99 = statistics.quantiles(reserved, n=100, method="inclusive")[98] if len(reserved) > 1 else reserved[0]
    settled = reserved.index(max(reserved)) + 1
    return ReservedOverSteps(how, max(reserved), round(p99), round(statistics.fmean(reserved)), settled)
