"""The largest number that still fits, found in few runs: by what each more takes, and by halves where that misleads."""

from __future__ import annotations

from collections.abc import Callable

from memprof.report.documents.recommendation import LargestFit


def counted_bytes(needed_bytes: int, available: int, *, fits: bool) -> int:
    """Return what a run counts for: it may fit although it needs more, for the allocator gives its cache back."""
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
    """Find the largest number from `low` to `high` for which no more than `available` is needed.

    What comes back was tried, both sides: `largest` and the next number. Numbers are multiples of `grain`, or one of
    the three that are given. Where the need is nearly a straight line, as memory is in the batch, that takes about
    three runs; at the worst, twice as many as bisection.

    Args:
        needed: bytes at a number; grows with it, but for what the allocator rounds.
        begin: where to look first.
        likely: where to look next if that fits, and outward from there, until one fits and one does not.
        beyond: try so many numbers past the first that does not fit as well: rounding may make one need less.
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
            further = [above + grain * place for place in range(1, beyond + 1)]
            later = next((number for number in further if number <= high and fits(number)), None)
            if later is None:
                return LargestFit(below, above if above <= high else None)
            # The next that is known not to fit, or all that there is.
            below, above = later, min((n for n in known if n > later and known[n] > available), default=high + 1)
            continue
        tries += 1
        number = (first + last) // 2 // grain * grain if above <= high else min(2 * below, high)
        if tries % 3:  # every third by halves, so that a bend cannot hold it up
            number = _interpolate(known, available, number)
        number = min(max(number if number >= last else number // grain * grain, first), last)
        if fits(number):
            below = number
        else:
            above = number


def _numbers_between(below: int, above: int, high: int, grain: int) -> tuple[int, int]:
    """Return the first and the last that may be tried, where `below` fits and `above` does not, or is beyond `high`."""
    first, last = (below // grain + 1) * grain, (above - 1) // grain * grain
    return (min(first, high), high) if above > high else (first, last)


def _narrow(likely: int, fits: Callable[[int], bool], below: int, above: int, high: int, grain: int) -> tuple[int, int]:
    """Return `below` and `above` closer together: outward from `likely`, twice as far each time."""
    side: bool | None = None
    distance = 0
    while True:
        first, last = _numbers_between(below, above, high, grain)
        if below >= last:
            return below, above
        number = likely + (distance if side else -distance)
        number = min(max(number if number >= last else number // grain * grain, first), last)
        before, side = side, fits(number)
        below, above = (number, above) if side else (below, number)
        if before not in (None, side):
            return below, above
        distance = 2 * distance or grain


def _interpolate(known: dict[int, int], available: int, otherwise: int) -> int:
    """Return where the line through the two known points next to `available` meets it."""
    nearest = sorted(known, key=lambda number: abs(known[number] - available))[:2]
    if len(nearest) < 2:
        return otherwise
    one, two = sorted(nearest)
    rise = known[two] - known[one]
    if rise <= 0:
        return otherwise
    return int(one + (available - known[one]) * (two - one) / rise)
