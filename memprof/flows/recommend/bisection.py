"""Search in few runs for the largest integer that fits: by linear interpolation, with a bisection every third try."""

from __future__ import annotations

from collections.abc import Callable

from memprof.report.documents.recommendation import LargestFit


def clamp_to_verdict(needed_bytes: int, available_bytes: int, *, fits: bool) -> int:
    """Return the bytes of a run for the search: at most `available_bytes` if it fits (after retries), else more."""
    return min(needed_bytes, available_bytes) if fits else max(needed_bytes, available_bytes + 1)


def find_limit(
    compute_bytes: Callable[[int], int],
    available_bytes: int,
    *,
    low: int,
    high: int,
    step_size: int = 1,
    start: int | None = None,
    estimate: int | None = None,
    num_extra_tries: int = 0,
) -> LargestFit:
    """Return the largest number from `low` to `high` that needs at most `available_bytes` bytes, and the next number.

    Both numbers were tried. Numbers are multiples of `step_size`, or `low`, `high` or `start`. If the bytes grow almost
    linearly, as with the batch size, the search takes about three runs; at the worst, twice as many as bisection.

    Args:
        compute_bytes: returns the bytes at a number; grows with the number, except for the allocator's rounding.
        start: number that is tried first.
        estimate: number that is tried next if `start` fits; from there outward until one fits and one does not.
        num_extra_tries: how many numbers past the first that does not fit are tried too: by rounding one may fit.
    """
    known: dict[int, int] = {}

    def fits(number: int) -> bool:
        if number not in known:
            known[number] = compute_bytes(number)
        return known[number] <= available_bytes

    start = min(max(start or low, low), high)
    if fits(start):
        below, above = start, high + 1
    elif start > low and fits(low):
        below, above = low, start
    else:
        return LargestFit(None, low)
    if estimate is not None:
        below, above = _narrow(estimate, fits, below, above, high, step_size)
    tries = 0
    while True:
        first, last = _numbers_between(below, above, high, step_size)
        if below >= last:
            candidates = [above + step_size * place for place in range(1, num_extra_tries + 1)]
            fitting = next((number for number in candidates if number <= high and fits(number)), None)
            if fitting is None:
                return LargestFit(below, above if above <= high else None)
            # `above` is the next number known not to fit, or the end.
            below, above = (
                fitting,
                min((n for n in known if n > fitting and known[n] > available_bytes), default=high + 1),
            )
            continue
        tries += 1
        number = (first + last) // 2 // step_size * step_size if above <= high else min(2 * below, high)
        if tries % 3:  # every third try bisects, in case the need is not linear
            number = _interpolate(known, available_bytes, number)
        number = min(max(number if number >= last else number // step_size * step_size, first), last)
        if fits(number):
            below = number
        else:
            above = number


def _numbers_between(below: int, above: int, high: int, step_size: int) -> tuple[int, int]:
    """Return the first and last number to try, where `below` fits and `above` does not (or exceeds `high`)."""
    first, last = (below // step_size + 1) * step_size, (above - 1) // step_size * step_size
    return (min(first, high), high) if above > high else (first, last)


def _narrow(
    estimate: int, fits: Callable[[int], bool], below: int, above: int, high: int, step_size: int
) -> tuple[int, int]:
    """Return a narrower `below` and `above`: try numbers outward from `estimate`, doubling the distance."""
    fits_last: bool | None = None
    distance = 0
    while True:
        first, last = _numbers_between(below, above, high, step_size)
        if below >= last:
            return below, above
        number = estimate + (distance if fits_last else -distance)
        number = min(max(number if number >= last else number // step_size * step_size, first), last)
        before, fits_last = fits_last, fits(number)
        below, above = (number, above) if fits_last else (below, number)
        if before not in (None, fits_last):
            return below, above
        distance = 2 * distance or step_size


def _interpolate(known: dict[int, int], available_bytes: int, default: int) -> int:
    """Return the number at which the line through the two known points nearest to `available_bytes` reaches it."""
    nearest = sorted(known, key=lambda number: abs(known[number] - available_bytes))[:2]
    if len(nearest) < 2:
        return default
    one, two = sorted(nearest)
    rise = known[two] - known[one]
    if rise <= 0:
        return default
    return int(one + (available_bytes - known[one]) * (two - one) / rise)
