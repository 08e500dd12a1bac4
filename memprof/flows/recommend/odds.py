"""Lengths of a data set and a configuration: the longest batch that fits, and the odds of a longer batch. The
odds are exact, without sampling.
"""

from __future__ import annotations

import bisect
import dataclasses
import math

from memprof.flows.recommend.search import Search, Tried
from memprof.report.documents.recommendation import LengthRisk, LengthRow


def cut_lengths(lengths: list[int], read: LengthRisk, context_length: int | None) -> tuple[list[int], LengthRisk]:
    """Return lengths and statistics cut to the context length, as by a tokenizer's `max_length`; None cuts nothing."""
    limit = context_length or lengths[-1]
    truncated = len(lengths) - bisect.bisect_right(lengths, limit)
    cut = [min(length, limit) for length in lengths]
    return cut, dataclasses.replace(
        read,
        truncated=truncated,
        shortest=cut[0],
        median=min(read.median, limit),
        p99=min(read.p99, limit),
        longest=cut[-1],
        packed_rows=-(-sum(lengths) // limit),
        context_length=limit,
    )


def length_row(search: Search, tried: Tried, lengths: list[int], size: int, context_length: int) -> LengthRow:
    """Return the row of micro-batch `size`; a batch needs as much memory as if all were its longest sequence."""
    accumulation = max(search.effective_batch // size, 1)
    limit = search.runs.limit(
        lambda length: tried.plan.spec(search.base.edit(context_length=length), size, accumulation),
        lambda length: f"{size} x {length:,} tokens",
        accumulation,
        begin=lengths[-1],
        high=lengths[-1],
    )
    longest = limit.largest or 0
    count = len(lengths)
    too_long = count - bisect.bisect_right(lengths, longest)
    return LengthRow(
        micro_batch=size,
        longest_fitting=limit.largest,
        first_too_long=limit.first_too_large,
        too_long=too_long,
        batches=count // size,
        batch_odds=1.0 - odds_of_none(count, too_long, size) if size <= count else 0.0,
        epoch_odds=1.0 - odds_of_none(count, too_long, count // size * size),
        first_step_median=first_step_at_odds(count, too_long, size, 0.5),
        first_step_90=first_step_at_odds(count, too_long, size, 0.9),
        step_sorted_ascending=first_step_sorted(lengths, longest, size, ascending=True),
        step_sorted_descending=first_step_sorted(lengths, longest, size, ascending=False),
        packed_fits=longest >= context_length,
    )


def odds_of_none(count: int, marked: int, drawn: int) -> float:
    """Return the odds that `drawn` of `count` sequences, drawn without replacement, are all unmarked.

    C(count - marked, drawn) / C(count, drawn): the product of (count - drawn - i) / (count - i) for i below `marked`,
    or with `marked` and `drawn` exchanged; the shorter product is computed, by logarithms.
    """
    if marked <= 0 or drawn <= 0:
        return 1.0
    if marked + drawn > count:
        return 0.0
    few, many = sorted((marked, drawn))
    return math.exp(sum(math.log1p(-many / (count - place)) for place in range(few)))


def first_step_at_odds(count: int, marked: int, batch: int, odds: float) -> int | None:
    """Return the first step of a random-order epoch by which a marked sequence has occurred with these odds.

    None if an epoch of full batches does not reach these odds. The first n batches are n x `batch` sequences drawn
    without replacement.
    """
    steps = count // batch
    before = bisect.bisect_left(
        range(1, steps + 1), odds, key=lambda step: 1.0 - odds_of_none(count, marked, step * batch)
    )
    return before + 1 if before < steps else None


def first_step_sorted(lengths: list[int], limit: int, batch: int, *, ascending: bool) -> int | None:
    """Return the first step of sorted batches with a sequence longer than `limit`; None if no batch has one.

    `lengths` are in ascending order; `limit` is 0 if nothing fits; an incomplete last batch is dropped.
    """
    ordered = lengths if ascending else lengths[::-1]
    for step in range(len(ordered) // batch):
        if max(ordered[step * batch], ordered[(step + 1) * batch - 1]) > limit:
            return step + 1
    return None
