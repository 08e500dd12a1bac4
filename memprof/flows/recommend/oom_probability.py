"""Probability that batches of a data set are longer than a configuration fits: exact, without sampling."""

from __future__ import annotations

import bisect
import dataclasses
import math

from memprof.flows.recommend.search import PlanRun, Search
from memprof.report.documents.recommendation import LengthRisk, LengthRow


def cut_lengths(lengths: list[int], statistics: LengthRisk, context_length: int | None) -> tuple[list[int], LengthRisk]:
    """Return ascending lengths truncated to `context_length` (None: not truncated), and their `statistics`."""
    max_length = context_length or lengths[-1]
    num_truncated = len(lengths) - bisect.bisect_right(lengths, max_length)
    limited = [min(length, max_length) for length in lengths]
    return limited, dataclasses.replace(
        statistics,
        truncated=num_truncated,
        shortest=limited[0],
        median=min(statistics.median, max_length),
        p99=min(statistics.p99, max_length),
        longest=limited[-1],
        packed_rows=-(-sum(lengths) // max_length),
        context_length=max_length,
    )


def build_length_row(
    search: Search, run: PlanRun, lengths: list[int], micro_batch: int, context_length: int
) -> LengthRow:
    """Return the longest sequence that fits at one micro-batch size, and how likely `lengths` exceed it.

    A batch is padded: it takes the memory of its longest sequence for each."""
    accumulation = max(search.effective_batch // micro_batch, 1)
    limit = search.simulator.find_run_limit(
        lambda length: run.plan.make_spec(search.base_spec.edit(context_length=length), micro_batch, accumulation),
        lambda length: f"{micro_batch} x {length:,} tokens",
        accumulation,
        start=lengths[-1],
        high=lengths[-1],
    )
    longest_fitting = limit.largest or 0
    count = len(lengths)
    num_too_long = count - bisect.bisect_right(lengths, longest_fitting)
    return LengthRow(
        micro_batch=micro_batch,
        longest_fitting=limit.largest,
        first_too_long=limit.first_too_large,
        too_long=num_too_long,
        batches=count // micro_batch,
        batch_odds=1.0 - compute_no_draw_probability(count, num_too_long, micro_batch) if micro_batch <= count else 0.0,
        epoch_odds=1.0 - compute_no_draw_probability(count, num_too_long, count // micro_batch * micro_batch),
        first_step_median=find_step_by_probability(count, num_too_long, micro_batch, 0.5),
        first_step_90=find_step_by_probability(count, num_too_long, micro_batch, 0.9),
        step_sorted_ascending=find_step_in_sorted_order(lengths, longest_fitting, micro_batch, ascending=True),
        step_sorted_descending=find_step_in_sorted_order(lengths, longest_fitting, micro_batch, ascending=False),
        packed_fits=longest_fitting >= context_length,
    )


def compute_no_draw_probability(num_sequences: int, num_marked: int, num_drawn: int) -> float:
    """Return the probability that none of `num_marked` sequences is among `num_drawn` drawn without replacement.

    With n = `num_sequences`: C(n - marked, drawn) / C(n, drawn), the product of (n - drawn - i) / (n - i) for i below
    marked, or with marked and drawn exchanged; the shorter product is computed, by logarithms.
    """
    if num_marked <= 0 or num_drawn <= 0:
        return 1.0
    if num_marked + num_drawn > num_sequences:
        return 0.0
    few, many = sorted((num_marked, num_drawn))
    return math.exp(sum(math.log1p(-many / (num_sequences - i)) for i in range(few)))


def find_step_by_probability(num_sequences: int, num_marked: int, batch_size: int, probability: float) -> int | None:
    """Return the first step by which one of `num_marked` sequences has occurred with `probability`, in random order.

    None if an epoch of full batches does not reach `probability`."""
    num_steps = num_sequences // batch_size
    num_steps_before = bisect.bisect_left(
        range(1, num_steps + 1),
        probability,
        key=lambda step: 1.0 - compute_no_draw_probability(num_sequences, num_marked, step * batch_size),
    )
    return num_steps_before + 1 if num_steps_before < num_steps else None


def find_step_in_sorted_order(lengths: list[int], limit: int, batch_size: int, *, ascending: bool) -> int | None:
    """Return the first step of sorted batches with a sequence longer than `limit`; None if no batch has one.

    `lengths` are in ascending order; `limit` is 0 if nothing fits; an incomplete last batch is dropped.
    """
    ordered = lengths if ascending else lengths[::-1]
    for step in range(len(ordered) // batch_size):
        if max(ordered[step * batch_size], ordered[(step + 1) * batch_size - 1]) > limit:
            return step + 1
    return None
