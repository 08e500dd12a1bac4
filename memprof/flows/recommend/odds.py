"""The odds that a batch of a data set has a sequence too long for the card: exact, nothing is sampled."""

from __future__ import annotations

import bisect
import math


def none_drawn(count: int, marked: int, drawn: int) -> float:
    """The odds that `drawn` of `count`, without putting back, are all unmarked.

    C(count - marked, drawn) / C(count, drawn): the product of (count - drawn - i) / (count - i) for each of the marked,
    or the same with both exchanged: the shorter of the two, by logarithms.
    """
    if marked <= 0 or drawn <= 0:
        return 1.0
    if marked + drawn > count:
        return 0.0
    few, many = sorted((marked, drawn))
    return math.exp(sum(math.log1p(-many / (count - place)) for place in range(few)))


def step_by_which(count: int, marked: int, batch: int, odds: float) -> int | None:
    """The first step by which a marked sequence has been met with these odds, in one epoch in random order.

    None if an epoch of full batches does not reach these odds. An epoch's first n batches are n x batch sequences
    without putting back.
    """
    steps = count // batch
    before = bisect.bisect_left(
        range(1, steps + 1), odds, key=lambda step: 1.0 - none_drawn(count, marked, step * batch)
    )
    return before + 1 if before < steps else None


def step_sorted(lengths: list[int], limit: int, batch: int, *, ascending: bool) -> int | None:
    """The first batch with a sequence longer than `limit` when they are sorted by length; None if there is none.

    Args:
        lengths: in ascending order.
        limit: tokens; 0 if nothing fits.
        batch: sequences; what is left over at the end makes no batch.
        ascending: shortest first.
    """
    ordered = lengths if ascending else lengths[::-1]
    for step in range(len(ordered) // batch):
        if max(ordered[step * batch], ordered[(step + 1) * batch - 1]) > limit:
            return step + 1
    return None
