"""The budget counts down, and cuts limits to what is left."""

from __future__ import annotations

from tests.gpu.budget import PACKING_S, Budget


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_limit_is_cut_to_what_is_left_before_packing() -> None:
    clock = Clock()
    budget = Budget(100 + PACKING_S, clock)
    assert budget.limit(needs=10, wants=60) == 60
    clock.now += 50
    assert budget.elapsed() == budget.left() == 50
    assert budget.limit(needs=10, wants=60) == 50


def test_nothing_begins_with_less_than_it_needs() -> None:
    clock = Clock()
    budget = Budget(100 + PACKING_S, clock)
    clock.now += 90
    assert budget.limit(needs=10, wants=60) == 10
    assert budget.limit(needs=10.1, wants=60) is None
    clock.now += 20
    assert budget.left() == -10
    assert budget.limit(needs=0, wants=60) is None
