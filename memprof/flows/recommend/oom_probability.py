"""Probability that batches of a data set are longer than a configuration fits: exact, without sampling."""

from __future__ import annotations

import bisect
import dataclasses
import math

from memprof.flows.recommend.search import PlanRun, Search
from memprof.report.documents.recommendation import LengthRisk, LengthRow


def cut_lengths(lengths: list[int], statistics: LengthRisk, context_length: int | None) -> tuple[list[int], LengthRisk]:
    """Return lengths and statistics cut to the context length, as by a tokenizer's `max_length`; None cuts nothing."""
    limit = context_length or lengths[-1]
    truncated = len(lengths) - bisect.bisect_right(lengths, limit)
    cut = [min(length, limit) for length in lengths]
    return cut, dataclasses.replace(
        statistics,
        truncated=truncated,
        shortest=cut[0],
        median=min(statistics.median, limit),
        p99=min(statistics.p99, limit),
        longest=cut[-1],
        packed_rows=-(-sum(lengths) // limit),
        context_length=limit,
    )


def build_length_row(
    search: Search, run: PlanRun, lengths: list[int], micro_batch: int, context_length: int
) -> LengthRow:
    """Return the row of one micro-batch size; a batch needs as much memory as if all were its longest sequence."""
    accumulation = max(search.effective_batch // micro_batch, 1)
    limit = search.simulator.find_run_limit(
        lambda length: run.plan.make_spec(search.base_spec.edit(context_length=length), micro_batch, accumulation),
        lambda length: f"{micro_batch} x {length:,} tokens",
        accumulation,
        start=lengths[-1],
        high=lengths[-1],
    )
    longest = limit.largest or 0
    count = len(lengths)
    too_long = count - bisect.bisect_right(lengths, longest)
    return LengthRow(
        micro_batch=micro_batch,
        longest_fitting=limit.largest,
        first_too_long=limit.first_too_large,
        too_long=too_long,
        batches=count // micro_batch,
        batch_odds=1.0 - compute_no_draw_probability(count, too_long, micro_batch) if micro_batch <= count else 0.0,
        epoch_odds=1.0 - compute_no_draw_probability(count, too_long, count // micro_batch * micro_batch),
        first_step_median=find_step_by_probability(count, too_long, micro_batch, 0.5),
        first_step_90=find_step_by_probability(count, too_long, micro_batch, 0.9),
        step_sorted_ascending=find_step_in_sorted_order(lengths, longest, micro_batch, ascending=True),
        step_sorted_descending=find_step_in_sorted_order(lengths, longest, micro_batch, ascending=False),
        packed_fits=longest >= context_length,
    )


def compute_no_draw_probability(count: int, num_marked: int, num_drawn: int) -> float:
    """Return the probability that `num_drawn` of `count` sequences, drawn without replacement, are all unmarked.

    C(count - marked, drawn) / C(count, drawn): the product of (count - drawn - i) / (count - i) for i below marked, or
    with marked and drawn exchanged; the shorter product is computed, by logarithms.
    """
    if num_marked <= 0 or num_drawn <= 0:
        return 1.0
    if num_marked + num_drawn > count:
        return 0.0
    few, many = sorted((num_marked, num_drawn))
    return math.exp(sum(math.log1p(-many / (count - place)) for place in range(few)))


def find_step_by_probability(count: int, num_marked: int, batch_size: int, probability: float) -> int | None:
    """Return the first step of a random-order epoch by which a marked sequence has occurred with `probability`.

    None if an epoch of full batches does not reach `probability`. The first n batches are n x
    `batch_size` sequences drawn without replacement.
    """
    steps = count // batch_size
    before = bisect.bisect_left(
        range(1, steps + 1),
        probability,
        key=lambda step: 1.0 - compute_no_draw_probability(count, num_marked, step * batch_size),
    )
    return before + 1 if before < steps else None


def find_step_in_sorted_order(lengths: list[int], limit: int, batch_size: int, *, ascending: bool) -> int | None:
    """Return the first step of sorted batches with a sequence longer than `limit`; None if no batch has one.

    `lengths` are in ascending order; `limit` is 0 if nothing fits; an incomplete last batch is dropped.
    """
    ordered = lengths if ascending else lengths[::-1]
    for step in range(len(ordered) // batch_size):
        if max(ordered[step * batch_size], ordered[(step + 1) * batch_size - 1]) > limit:
            return step + 1
    return None
