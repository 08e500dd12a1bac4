"""Lengths of a data set against a configuration: the longest batch that fits, and the odds of a longer one. The
odds are exact, nothing is sampled.
"""

from __future__ import annotations

import bisect
import dataclasses
import math

from memprof.flows.recommend.search import Search, Tried
from memprof.report.documents.recommendation import LengthRisk, LengthRow


def cut_lengths(lengths: list[int], read: LengthRisk, context_length: int | None) -> tuple[list[int], LengthRisk]:
    """Cut sequences to the context length, as a tokenizer with `max_length` cuts them; None cuts nothing."""
    limit = context_length or lengths[-1]
    truncated = len(lengths) - bisect.bisect_right(lengths, limit)
    after = [min(length, limit) for length in lengths]
    return after, dataclasses.replace(
        read,
        truncated=truncated,
        shortest=after[0],
        median=min(read.median, limit),
        p99=min(read.p99, limit),
        longest=after[-1],
        packed_rows=-(-sum(lengths) // limit),
        context_length=limit,
    )


def length_row(search: Search, tried: Tried, lengths: list[int], size: int, context_length: int) -> LengthRow:
    """Return the row of a micro-batch. Padded to its longest sequence, it needs what a batch of that length needs."""
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
    """Return the odds that `drawn` of `count`, without putting back, are all unmarked.

    C(count - marked, drawn) / C(count, drawn): the product of (count - drawn - i) / (count - i) for each of the marked,
    or the same with both exchanged: the shorter of the two, by logarithms.
    """
    if marked <= 0 or drawn <= 0:
        return 1.0
    if marked + drawn > count:
        return 0.0
    few, many = sorted((marked, drawn))
    return math.exp(sum(math.log1p(-many / (count - place)) for place in range(few)))


def first_step_at_odds(count: int, marked: int, batch: int, odds: float) -> int | None:
    """Return the first step by which a marked sequence has been met with these odds, in one epoch in random order.

    None if an epoch of full batches does not reach these odds. An epoch's first n batches are n x batch sequences
    without putting back.
    """
    steps = count // batch
    before = bisect.bisect_left(
        range(1, steps + 1), odds, key=lambda step: 1.0 - odds_of_none(count, marked, step * batch)
    )
    return before + 1 if before < steps else None


def first_step_sorted(lengths: list[int], limit: int, batch: int, *, ascending: bool) -> int | None:
    """Return the first batch with a sequence above `limit` when they are sorted by length; None if there is none.

    `lengths` are in ascending order; `limit` is 0 if nothing fits; what is left over at the end makes no batch.
    """
    ordered = lengths if ascending else lengths[::-1]
    for step in range(len(ordered) // batch):
        if max(ordered[step * batch], ordered[(step + 1) * batch - 1]) > limit:
            return step + 1
    return None
