"""Search in few runs for the largest integer that fits: by linear interpolation, with a bisection every third try."""

from __future__ import annotations

from collections.abc import Callable

from memprof.report.documents.recommendation import LargestFit


def clamp_to_verdict(needed_bytes: int, available_bytes: int, *, fits: bool) -> int:
    """Return `needed_bytes`, changed so that they exceed `available_bytes` exactly if the run does not fit."""
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
    """Return the largest number from `low` to `high` with `compute_bytes(number)` at most `available_bytes`, and the
    next larger number, which was tried too.

    Numbers are multiples of `step_size`, or `low`, `high` or `start`. `start` is tried first, then `estimate` and
    numbers around it. If bytes grow linearly, the search takes about three tries; at the worst, twice as many as
    bisection. Because of the allocator's rounding, `num_extra_tries` numbers past the first too large are tried too.
    """
    known: dict[int, int] = {}

    def fits(number: int) -> bool:
        if number not in known:
            known[number] = compute_bytes(number)
        return known[number] <= available_bytes

    start = min(max(start or low, low), high)
    if fits(start):
        last_fit, first_misfit = start, high + 1
    elif start > low and fits(low):
        last_fit, first_misfit = low, start
    else:
        return LargestFit(None, low)
    if estimate is not None:
        last_fit, first_misfit = _narrow_range(estimate, fits, last_fit, first_misfit, high, step_size)
    num_tries = 0
    while True:
        first, last = _find_range_to_try(last_fit, first_misfit, high, step_size)
        if last_fit >= last:
            candidates = [first_misfit + step_size * offset for offset in range(1, num_extra_tries + 1)]
            next_fit = next((number for number in candidates if number <= high and fits(number)), None)
            if next_fit is None:
                return LargestFit(last_fit, first_misfit if first_misfit <= high else None)
            # `above` is the next number known not to fit, or the end.
            last_fit, first_misfit = (
                next_fit,
                min((n for n in known if n > next_fit and known[n] > available_bytes), default=high + 1),
            )
            continue
        num_tries += 1
        number = (first + last) // 2 // step_size * step_size if first_misfit <= high else min(2 * last_fit, high)
        if num_tries % 3:  # every third try bisects, in case the need is not linear
            number = _interpolate(known, available_bytes, number)
        number = min(max(number if number >= last else number // step_size * step_size, first), last)
        if fits(number):
            last_fit = number
        else:
            first_misfit = number


def _find_range_to_try(last_fit: int, first_misfit: int, high: int, step_size: int) -> tuple[int, int]:
    """Return the first and last number to try between `last_fit` and `first_misfit` (above `high`: none known)."""
    first, last = (last_fit // step_size + 1) * step_size, (first_misfit - 1) // step_size * step_size
    return (min(first, high), high) if first_misfit > high else (first, last)


def _narrow_range(
    estimate: int, fits: Callable[[int], bool], last_fit: int, first_misfit: int, high: int, step_size: int
) -> tuple[int, int]:
    """Return `last_fit` and `first_misfit` after tries of numbers at doubling distances from `estimate`."""
    fits_now: bool | None = None
    distance = 0
    while True:
        first, last = _find_range_to_try(last_fit, first_misfit, high, step_size)
        if last_fit >= last:
            return last_fit, first_misfit
        number = estimate + (distance if fits_now else -distance)
        number = min(max(number if number >= last else number // step_size * step_size, first), last)
        fitted_before, fits_now = fits_now, fits(number)
        last_fit, first_misfit = (number, first_misfit) if fits_now else (last_fit, number)
        if fitted_before not in (None, fits_now):
            return last_fit, first_misfit
        distance = 2 * distance or step_size


def _interpolate(bytes_by_number: dict[int, int], available_bytes: int, default: int) -> int:
    """Return the number that takes `available_bytes` by linear interpolation of the two nearest known numbers."""
    nearest = sorted(bytes_by_number, key=lambda number: abs(bytes_by_number[number] - available_bytes))[:2]
    if len(nearest) < 2:
        return default
    smaller, larger = sorted(nearest)
    added_bytes = bytes_by_number[larger] - bytes_by_number[smaller]
    if added_bytes <= 0:
        return default
    return int(smaller + (available_bytes - bytes_by_number[smaller]) * (larger - smaller) / added_bytes)
