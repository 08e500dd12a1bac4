"""The largest number that still fits, found in few runs: by what each more takes, and by halves where that misleads."""

from __future__ import annotations

from collections.abc import Callable

from memprof.report.documents.recommendation import Bound


def find_limit(
    needed: Callable[[int], int], available: int, *, low: int, high: int, grain: int = 1, begin: int | None = None
) -> Bound:
    """The largest multiple of `grain` from `low` to `high` for which no more than `available` is needed.

    What comes back was tried, both sides: `largest` and `largest + grain`. Where the need is nearly a straight line, as
    memory is in the batch, that takes about three runs; at the worst, twice as many as bisection.

    Args:
        needed: tried at each number; grows with it.
        available: bytes.
        low: the least number; a multiple of `grain`, as `high`.
        high: the largest number.
        grain: the step between two numbers.
        begin: where to look first.
    """
    known: dict[int, int] = {}

    def fits(place: int) -> bool:
        number = place * grain
        if number not in known:
            known[number] = needed(number)
        return known[number] <= available

    first, last = low // grain, high // grain
    place = min(max((begin or low) // grain, first), last)
    if not fits(place):
        if place == first or not fits(first):
            return Bound(None, low)
        below, above = first, place
    else:
        below, above = place, last + 1
    tries = 0
    while above - below > 1:
        tries += 1
        middle = (below + above) // 2 if above <= last else min(2 * max(below, 1), last)
        place = middle
        if tries % 3:  # every third by halves, so that a bend cannot hold it up
            place = _by_slope(known, available, grain, middle)
        place = min(max(place, below + 1), above - 1)
        if fits(place):
            below = place
        else:
            above = place
    return Bound(below * grain, above * grain if above <= last else None)


def _by_slope(known: dict[int, int], available: int, grain: int, otherwise: int) -> int:
    """Where the line through the two known points next to `available` meets it."""
    nearest = sorted(known, key=lambda number: abs(known[number] - available))[:2]
    if len(nearest) < 2:
        return otherwise
    one, two = sorted(nearest)
    rise = known[two] - known[one]
    if rise <= 0:
        return otherwise
    return int(one + (available - known[one]) * (two - one) / rise) // grain
