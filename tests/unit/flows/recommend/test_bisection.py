import bisect

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memprof.flows.recommend.bisection import clamp_to_verdict, find_limit
from tests.lanes import examples

EIGHT = [1] * 8  # the first number takes 1, the eighth 8


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=80), st.integers(-5, 60000), st.integers(0, 81),
    st.none() | st.integers(-3, 83),
)  # fmt: skip
@settings(max_examples=examples(200), deadline=None)
@example(EIGHT, 0, 1, None)
@example(EIGHT, 1, 1, None)
@example(EIGHT, 4, 4, None)
@example(EIGHT, 4, 5, None)
@example(EIGHT, 7, 8, 7)
@example(EIGHT, 7, 1, 8)
@example(EIGHT, 8, 8, 9)
@example(EIGHT, 8, 1, 8)
@example([1, 0, 0, 1000], 1, 1, 3)
def test_finds_the_last_that_fits(rises, available, begin, likely):
    needs = [sum(rises[: place + 1]) for place in range(len(rises))]
    asked = []

    def needed(number):
        asked.append(number)
        return needs[number - 1]

    limit = find_limit(needed, available, low=1, high=len(needs), start=begin, estimate=likely)
    expected = bisect.bisect_right(needs, available)
    assert limit.largest == (expected or None)
    assert limit.first_too_large == (expected + 1 if expected < len(needs) else None)
    assert len(asked) == len(set(asked))
    if expected:
        # Both sides of the answer were tried, not inferred.
        assert expected in asked
        assert expected == len(needs) or expected + 1 in asked


@pytest.mark.parametrize(
    ("need", "available", "grain", "asked"),
    [
        # A straight line is met at once: the largest of all, or what fits and the next.
        (lambda number: 16 * 10**9 + 450_000 * number, 24 * 10**9, 1, [8, 16, 4000]),
        (lambda number: 16 * 10**9 + 450_000 * number, 24 * 10**9, 256, [2048, 4096, 17_664, 35_328, 17_920]),
        # At a cliff there is no line: numbers are doubled, and then halves are taken.
        (lambda number: 10 if number <= 700 else 10**12, 100, 1,
         [8, 16, 32, 64, 128, 256, 512, 1024, 768, 640, 704, 672, 688, 696, 700, 702, 701]),
        # Where the line is bent, every third number is a half.
        (lambda number: number * number, 500_000, 1,
         [8, 16, 4000, 2008, 2007, 2006, 1011, 1010, 1009, 512, 962, 673, 817, 704, 707, 762, 708]),
    ],
)  # fmt: skip
def test_numbers_that_are_tried(need, available, grain, asked):
    tried = []

    def needed(number):
        tried.append(number)
        return need(number)

    limit = find_limit(needed, available, low=grain, high=grain * 4000, step_size=grain, start=8 * grain)
    assert tried == asked
    fitting = [number for number in asked if need(number) <= available]
    assert limit.largest == max(fitting)
    assert limit.first_too_large == min({*asked} - {*fitting}, default=None)


def test_what_is_counted_agrees_with_what_was_seen():
    assert [clamp_to_verdict(need, 10, fits=True) for need in (9, 10, 11)] == [9, 10, 10]
    assert [clamp_to_verdict(need, 10, fits=False) for need in (10, 11, 12)] == [11, 11, 12]


@pytest.mark.parametrize(
    ("likely", "asked_then"),
    [(3000, [3000, 3001]), (3001, [3001, 3000]), (2999, [2999, 3000, 3001]), (2998, [2998, 2999, 3000, 3002, 3001])],
)
def test_what_is_likely_is_looked_at_next(likely, asked_then):
    asked = []

    def needed(number):
        asked.append(number)
        return 1_000_000 + 1000 * number

    limit = find_limit(needed, 4_000_000, low=1, high=100_000, start=8, estimate=likely)
    assert (limit.largest, limit.first_too_large) == (3000, 3001)
    assert asked == [8, *asked_then]


def test_nothing_fits():
    assert find_limit(lambda number: 10, 5, low=1, high=9).largest is None


@given(st.lists(st.integers(0, 40), min_size=4, max_size=40), st.integers(0, 1000), st.integers(1, 4))
@example([10, 0, 40, 0, 40, 0, 40], 180, 1)  # beyond 3 fits 4, beyond 5 fits 6
@example([0, 40, 0, 40, 0, 0, 0], 60, 1)
def test_looks_beyond_what_rounding_may_hide(rises, available, begin):
    """Need that falls again, as the allocator's rounding may have it: what is named fits, and nothing near it more."""
    needs = [30 * place + rise for place, rise in enumerate(rises)]
    asked = {}

    def needed(number):
        asked[number] = needs[number - 1]
        return asked[number]

    limit = find_limit(needed, available, low=1, high=len(needs), start=begin, num_extra_tries=2)
    if limit.largest is None:
        assert needs[0] > available
        return
    assert asked[limit.largest] <= available
    for number in range(limit.largest + 1, min(limit.largest + 4, len(needs) + 1)):
        assert asked[number] > available
