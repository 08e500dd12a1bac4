"""What the lengths of a data set do to a configuration: the worst batch, and when it is met."""

from __future__ import annotations

import bisect
import dataclasses

from memprof.flows.recommend.odds import none_drawn, step_by_which, step_sorted
from memprof.flows.recommend.search import Search, Tried
from memprof.report.documents.recommendation import LengthRow, Lengths


def cut(lengths: list[int], read: Lengths, context_length: int | None) -> tuple[list[int], Lengths]:
    """Sequences cut to the context length, as a tokenizer with `max_length` cuts them; None cuts nothing."""
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
    """A micro-batch. Padded to its longest sequence, it needs what a batch of that length needs."""
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
        batch_odds=1.0 - none_drawn(count, too_long, size) if size <= count else 0.0,
        epoch_odds=1.0 - none_drawn(count, too_long, count // size * size),
        first_step_median=step_by_which(count, too_long, size, 0.5),
        first_step_90=step_by_which(count, too_long, size, 0.9),
        step_sorted_ascending=step_sorted(lengths, longest, size, ascending=True),
        step_sorted_descending=step_sorted(lengths, longest, size, ascending=False),
        packed_fits=longest >= context_length,
    )
