"""Search for the largest number that fits in few runs: by linear interpolation, with a bisection every third try."""

from __future__ import annotations

from collections.abc import Callable

from memprof.report.documents.recommendation import LargestFit


def counted_bytes(needed_bytes: int, available: int, *, fits: bool) -> int:
    """Return the bytes of a run for the search: at most `available` if it fits (after retries), else more."""
    return min(needed_bytes, available) if fits else max(needed_bytes, available + 1)


def find_limit(
    needed: Callable[[int], int],
    available: int,
    *,
    low: int,
    high: int,
    grain: int = 1,
    begin: int | None = None,
    likely: int | None = None,
    beyond: int = 0,
) -> LargestFit:
    """Return the largest number from `low` to `high` that needs at most `available` bytes, and the next number.

    Both numbers were tried. Numbers are multiples of `grain`, or `low`, `high` or `begin`. For a nearly linear need,
    as memory is in the batch size, the search takes about three runs; at the worst, twice as many as bisection.

    Args:
        needed: returns the bytes at a number; grows with the number, except for the allocator's rounding.
        begin: number that is tried first.
        likely: number that is tried next if `begin` fits; from there outward until one fits and one does not.
        beyond: how many numbers past the first that does not fit are tried too: by rounding one may fit.
    """
    known: dict[int, int] = {}

    def fits(number: int) -> bool:
        if number not in known:
            known[number] = needed(number)
        return known[number] <= available

    begin = min(max(begin or low, low), high)
    if fits(begin):
        below, above = begin, high + 1
    elif begin > low and fits(low):
        below, above = low, begin
    else:
        return LargestFit(None, low)
    if likely is not None:
        below, above = _narrow(likely, fits, below, above, high, grain)
    tries = 0
    while True:
        first, last = _numbers_between(below, above, high, grain)
        if below >= last:
            candidates = [above + grain * place for place in range(1, beyond + 1)]
            fitting = next((number for number in candidates if number <= high and fits(number)), None)
            if fitting is None:
                return LargestFit(below, above if above <= high else None)
            # `above` is the next number known not to fit, or the end.
            below, above = fitting, min((n for n in known if n > fitting and known[n] > available), default=high + 1)
            continue
        tries += 1
        number = (first + last) // 2 // grain * grain if above <= high else min(2 * below, high)
        if tries % 3:  # every third try bisects, in case the need is not linear
            number = _interpolate(known, available, number)
        number = min(max(number if number >= last else number // grain * grain, first), last)
        if fits(number):
            below = number
        else:
            above = number


def _numbers_between(below: int, above: int, high: int, grain: int) -> tuple[int, int]:
    """Return the first and last number to try, where `below` fits and `above` does not (or exceeds `high`)."""
    first, last = (below // grain + 1) * grain, (above - 1) // grain * grain
    return (min(first, high), high) if above > high else (first, last)


def _narrow(likely: int, fits: Callable[[int], bool], below: int, above: int, high: int, grain: int) -> tuple[int, int]:
    """Return a narrower `below` and `above`: try numbers outward from `likely`, doubling the distance."""
    fits_last: bool | None = None
    distance = 0
    while True:
        first, last = _numbers_between(below, above, high, grain)
        if below >= last:
            return below, above
        number = likely + (distance if fits_last else -distance)
        number = min(max(number if number >= last else number // grain * grain, first), last)
        before, fits_last = fits_last, fits(number)
        below, above = (number, above) if fits_last else (below, number)
        if before not in (None, fits_last):
            return below, above
        distance = 2 * distance or grain


def _interpolate(known: dict[int, int], available: int, default: int) -> int:
    """Return the number at which the line through the two known points nearest to `available` reaches it."""
    nearest = sorted(known, key=lambda number: abs(known[number] - available))[:2]
    if len(nearest) < 2:
        return default
    one, two = sorted(nearest)
    rise = known[two] - known[one]
    if rise <= 0:
        return default
    return int(one + (available - known[one]) * (two - one) / rise)
