"""The odds against counting every order, and against fractions."""

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.flows.recommend.oom_probability import (
    compute_no_draw_probability,
    find_step_by_probability,
    find_step_in_sorted_order,
)


@given(st.integers(1, 400), st.data())
def test_none_drawn_is_the_hypergeometric(count, data):
    marked = data.draw(st.integers(0, count))
    drawn = data.draw(st.integers(0, count))
    exact = Fraction(math.comb(count - marked, drawn), math.comb(count, drawn))
    assert compute_no_draw_probability(count, marked, drawn) == pytest.approx(float(exact), rel=1e-9, abs=1e-300)


def test_step_by_which_counts_every_order():
    count, batch = 7, 2
    for marked in range(1, 4):
        firsts = []
        for order in itertools.permutations(range(count)):
            steps = [any(one < marked for one in order[at : at + batch]) for at in (0, 2, 4)]
            firsts.append(steps.index(True) + 1 if True in steps else None)
        for odds in (0.3, 0.5, 0.9, 0.999):
            expected = next(
                (s for s in (1, 2, 3) if sum(f is not None and f <= s for f in firsts) >= odds * len(firsts) - 1e-6),
                None,
            )
            assert find_step_by_probability(count, marked, batch, odds) == expected, (marked, odds)
        first = sum(f == 1 for f in firsts) / len(firsts)
        assert 1 - compute_no_draw_probability(count, marked, batch) == pytest.approx(first)


def test_sorted():
    lengths = [1, 2, 3, 4, 5, 9]
    assert find_step_in_sorted_order(lengths, 4, 2, ascending=True) == 3
    assert find_step_in_sorted_order(lengths, 4, 2, ascending=False) == 1
    assert find_step_in_sorted_order(lengths, 9, 2, ascending=False) is None
    assert find_step_in_sorted_order(lengths, 5, 4, ascending=True) is None  # the last two make no batch


def test_large_counts_are_exact_enough():
    # One long sequence among a million, in batches of 8: half of an epoch.
    assert find_step_by_probability(1_000_000, 1, 8, 0.5) == 62_500
    assert compute_no_draw_probability(10**9, 1, 5 * 10**8) == pytest.approx(0.5)
