"""Rule `larger-batch`: the batch of the step with the peak is larger than those of other steps, or than each before."""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from memprof.findings.evidence import file_and_line, format_shape, tensor_evidence
from memprof.findings.finding import Context, Evidence, Finding, Severity, cache_per_context, rule
from memprof.findings.groups import fix_at, is_large
from memprof.trace.events import PhaseKind, Role, Trace
from memprof.units import format_bytes

MIN_OTHER_STEPS = 3
MIN_TIMES = 1.5  # as large as in the median of the other steps

MIN_RISES = 3  # equal ones, from each step's batch to the next: fewer may be chance
MIN_RISES_OF_FIRST = 2  # each of as many rows as the first batch has: n, 2n, 3n


class _Batch(NamedTuple):
    """One input of the step with the peak, and its counterpart in most of the other steps."""

    storage: int
    usual: int  # a storage of the median size
    step: int
    larger: frozenset[int]  # all steps whose counterparts are larger than the median one


@rule(58)
def find(context: Context) -> list[Finding]:
    """Return at most one finding; `num_bytes` is the peak minus that of all other steps.
    Of a run that memory ended it is the batch of the last step, and the peak of those steps counts that have no larger
    batch than the median one. It is decisive if memory has room for these. A workload's batches are its
    spec's, which it gives one shape, or the lengths of its options."""
    ledger, trace = context.ledger, context.ledger.trace
    if context.spec is not None:
        return []
    growing = _find_growing(context)
    if growing is not None:
        return [growing]
    found = max(_iterate_larger(context), key=lambda batch: trace.storages[batch.storage].num_bytes, default=None)
    if found is None:
        return []
    is_cut = trace.ended_out_of_memory
    other_bytes = _find_peak_of_usual(context, found) if is_cut else _find_peak_without(context, found)
    saved_bytes = ledger.peak_bytes - other_bytes
    if not is_large(context, saved_bytes):
        return []
    storage, usual = trace.storages[found.storage], trace.storages[found.usual]
    line = trace.source_line(storage)
    title = (
        f"The batch of step {found.step} is {format_shape(storage.shape)} ({file_and_line(line)}), the median one "
        f"{format_shape(usual.shape)}; {'steps up to that' if is_cut else 'the other steps'} allocate at most "
        f"{format_bytes(other_bytes)}"
    )
    # Images differ in height and width, spectrograms in their length alone.
    num_larger = sum(more > few for more, few in zip(storage.shape[1:], usual.shape[1:], strict=True))
    are_images = len(storage.shape) > 3 and num_larger != 1
    what = "the size of the images" if are_images else "the length (truncate, split or drop long samples)"
    evidence: list[Evidence] = [
        fix_at(line, f"use a smaller batch size, or limit {what}"),
        tensor_evidence(trace, found.storage, f"step {found.step}: {format_shape(storage.shape)} {storage.dtype}"),
        tensor_evidence(trace, found.usual, f"the median step: {format_shape(usual.shape)} {usual.dtype}"),
    ]
    severity = Severity.NOTE if ledger.run.fits else Severity.WARNING
    has_room = context.usable_bytes is not None and other_bytes <= context.usable_bytes
    decides = has_room and not ledger.run.fits
    return [Finding("larger-batch", severity, title, saved_bytes, tuple(evidence), (), is_decisive=decides)]


def _iterate_larger(context: Context) -> Iterator[_Batch]:
    """Yield the inputs of the step with the peak that are larger than their counterparts in other steps, which the same
    operator of the same line has made."""
    trace = context.ledger.trace
    peak_step, kinds = _list_inputs(context)
    for by_step in kinds:
        others = [index for step, index in by_step.items() if step != peak_step]
        if peak_step in by_step and len(others) >= MIN_OTHER_STEPS and not _grow(_list_rows(trace, by_step)):
            usual = statistics.median_low((trace.storages[index].num_bytes, index) for index in others)[1]
            usual_bytes = trace.storages[usual].num_bytes
            larger = (step for step, index in by_step.items() if trace.storages[index].num_bytes > usual_bytes)
            if trace.storages[by_step[peak_step]].num_bytes >= MIN_TIMES * max(1, usual_bytes):
                yield _Batch(by_step[peak_step], usual, peak_step, frozenset(larger))


def _find_growing(context: Context) -> Finding | None:
    """Return the finding if memory ended a run in which each step's batch has more rows than the one before it, always
    by as many: a slice that begins at the first row each time, or a list that is not emptied."""
    ledger, trace = context.ledger, context.ledger.trace
    if not trace.ended_out_of_memory:
        return None
    peak_step, kinds = _list_inputs(context)
    growing = [by_step for by_step in kinds if peak_step in by_step and _are_rising(_list_rows(trace, by_step))]
    by_step = max(growing, key=lambda one: trace.storages[one[peak_step]].num_bytes, default=None)
    if by_step is None:
        return None
    forwards = _list_forwards(context)
    end = next(time for time, step in forwards if step > min(by_step))
    first_bytes = max(ledger.allocated[:end])
    if not is_large(context, ledger.peak_bytes - first_bytes):
        return None
    batches = [trace.storages[by_step[step]] for step in sorted(by_step)]
    shapes = [format_shape(batch.shape) for batch in batches]
    shapes[2:-1] = ["..."] * (len(shapes) > 3)
    line = trace.source_line(batches[-1])
    title = (
        f"The batch grows in each step: {', '.join(shapes)} in step {peak_step} "
        f"({file_and_line(line)}); step {min(by_step)} allocates at most {format_bytes(first_bytes)}"
    )
    fix = (
        "check that each step takes only its own rows (data[begin:end], not data[:end]; a list that is emptied after "
        "each), or limit their number"
    )
    evidence = (
        fix_at(line, fix),
        *(tensor_evidence(trace, by_step[step], f"step {step}: {format_shape(trace.storages[by_step[step]].shape)}")
          for step in (min(by_step), peak_step)),
    )  # fmt: skip
    num_bytes = ledger.peak_bytes - first_bytes
    return Finding("larger-batch", Severity.WARNING, title, num_bytes, evidence, (), is_decisive=True)


def _list_rows(trace: Trace, by_step: dict[int, int]) -> list[int]:
    """Return the rows of the batches `by_step`, step by step."""
    return [next(iter(trace.storages[by_step[step]].shape), 1) for step in sorted(by_step)]


def _grow(rows: list[int]) -> bool:
    """Return whether each batch has more rows than the one before, as in a search for the largest batch: none is an
    exception."""
    return all(few < more for few, more in pairwise(rows))


def _are_rising(rows: list[int]) -> bool:
    """Return whether batches of so many rows grow from each step to the next by as much: a search doubles them."""
    rises = {more - few for few, more in pairwise(rows)}
    min_rises = MIN_RISES_OF_FIRST if rises == {rows[0]} else MIN_RISES
    return len(rises) == 1 and _grow(rows) and len(rows) > min_rises


@cache_per_context
def _list_inputs(context: Context) -> tuple[int, list[dict[int, int]]]:
    """Return the step of the peak, or in which memory ended the run, and the inputs of training that the same operator
    of the same line has made, by step the largest; (0, []) if there is no step then."""
    ledger, trace, births = context.ledger, context.ledger.trace, context.lifetimes.births
    forwards = _list_forwards(context)
    begins, oom = [time for time, _ in forwards], ledger.out_of_memory
    event = oom.event if oom is not None and trace.ended_out_of_memory else ledger.peak_event
    moment = bisect.bisect_right(begins, event) - 1
    if moment < 0:
        return 0, []
    kinds: dict[tuple[object, ...], dict[int, int]] = defaultdict(dict)
    for index, owner in trace.owners.items():
        storage = trace.storages[index]
        next_forward = bisect.bisect_left(begins, births[index])
        if owner.role is Role.INPUT and storage.device == trace.device and next_forward < len(forwards):
            by_step = kinds[storage.op, storage.source, len(storage.shape), storage.dtype]
            step = forwards[next_forward][1]
            if step not in by_step or trace.storages[by_step[step]].num_bytes < storage.num_bytes:
                by_step[step] = index
    return forwards[moment][1], list(kinds.values())


def _find_peak_without(context: Context, batch: _Batch) -> int:
    """Return the most bytes allocated from the first step on, but from when `batch` is made to the end of its step."""
    allocated, forwards = context.ledger.allocated, _list_forwards(context)
    begin = context.lifetimes.births[batch.storage]
    end = next((time for time, step in forwards if step > batch.step), len(allocated))
    return max(max(allocated[forwards[0][0] : begin], default=0), max(allocated[end:], default=0))


def _find_peak_of_usual(context: Context, batch: _Batch) -> int:
    """Return the most bytes allocated in steps whose batches are no larger than the median one."""
    allocated, forwards = context.ledger.allocated, _list_forwards(context)
    spans = pairwise([*forwards, (len(allocated), 0)])
    return max(max(allocated[begin:end], default=0) for (begin, step), (end, _) in spans if step not in batch.larger)


def _list_forwards(context: Context) -> list[tuple[int, int]]:
    """Return the event at which each forward of training begins, and its step."""
    return [(time, phase.step) for time, phase in context.phases if phase.kind is PhaseKind.FORWARD and phase.step]
