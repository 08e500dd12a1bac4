import bisect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.flows.recommend.bisection import find_limit
from tests.lanes import examples


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=80), st.integers(-5, 60000), st.data())
@settings(max_examples=examples(200), deadline=None)
def test_finds_the_last_that_fits(rises, available, data):
    needs = [sum(rises[: place + 1]) for place in range(len(rises))]
    asked = []
    begin = data.draw(st.integers(1, len(needs)))

    def needed(number):
        asked.append(number)
        return needs[number - 1]

    likely = data.draw(st.none() | st.integers(-3, len(needs) + 3))
    limit = find_limit(needed, available, low=1, high=len(needs), start=begin, estimate=likely)
    expected = bisect.bisect_right(needs, available)
    assert limit.largest == (expected or None)
    assert limit.first_too_large == (expected + 1 if expected < len(needs) else None)
    assert len(asked) == len(set(asked))
    if expected:
        # Both sides of the answer were tried, not inferred.
        assert expected in asked
        assert expected == len(needs) or expected + 1 in asked


@pytest.mark.parametrize("grain", [1, 256])
def test_a_straight_line_takes_few_runs(grain):
    asked = []

    def needed(number):
        asked.append(number)
        return 16_000_000_000 + 450_000 * number

    limit = find_limit(needed, 24_000_000_000, low=grain, high=grain * 4000, step_size=grain, start=8 * grain)
    exact = (24_000_000_000 - 16_000_000_000) // 450_000 // grain * grain
    assert limit.largest == min(exact, grain * 4000)
    assert limit.first_too_large == (None if exact > grain * 4000 else limit.largest + grain)
    assert len(asked) <= 14


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
