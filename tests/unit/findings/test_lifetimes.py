"""Lifetimes and what is computed from them, in a trace whose bytes are counted by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from memprof.findings.lifetimes import Lifetimes, LiveSet, Saving
from memprof.units import MIB
from tests.unit.traces import TraceBuilder


def overlapping() -> Lifetimes:
    """Storages 0, 1 and 3 of 2, 4 and 8 MiB; 2 of 16 MiB, from event 3 on, is in host memory.

    Event:     1  2  3  4  5  6  7
    Storage 0  +  .  .  .  .  -
    Storage 1     +  .  -
    Storage 3              +  .  .
    Allocated  2  6  6  2 10  8  8
    """
    b = TraceBuilder()
    first = b.alloc(2 * MIB)
    second = b.alloc(4 * MIB)
    b.alloc(16 * MIB, device="cpu")
    b.free(second)
    b.alloc(8 * MIB)
    b.free(first)
    b.empty_cache()
    return b.context().lifetimes


def test_births_and_deaths_are_events() -> None:
    lifetimes = overlapping()
    assert list(lifetimes.births) == [1, 2, 3, 5] and list(lifetimes.deaths) == [6, 4, 8, 8]
    assert lifetimes.at_peak == {0, 3} and lifetimes.find_largest_at_peak() == 3


def test_bytes_are_those_of_blocks_on_the_gpu() -> None:
    b = TraceBuilder()
    odd, host = b.alloc(513), b.alloc(513, device="cpu")
    assert b.context().lifetimes.sum_bytes([odd, host, odd]) == 2 * 1024


@pytest.mark.parametrize(
    ("event", "live"), [(0, ()), (1, (0,)), (2, (0, 1)), (3, (0, 1, 2)), (4, (0, 2)), (5, (0, 2, 3)), (6, (2, 3))]
)
def test_live_from_the_allocation_until_before_the_free(event: int, live: tuple[int, ...]) -> None:
    lifetimes = overlapping()
    assert lifetimes.find_live(event, range(4)) == LiveSet(lifetimes.sum_bytes(live), event, live)


@pytest.mark.parametrize(
    ("storages", "num_mib", "event"), [((0, 1), 6, 2), ((0, 3), 10, 5), ((0,), 2, 1), ((1, 3), 8, 5), ((), 0, -1)]
)
def test_the_most_that_is_live_at_once(storages: tuple[int, ...], num_mib: int, event: int) -> None:
    most = overlapping().find_max_live(iter(storages))
    assert (most.num_bytes, most.event) == (num_mib * MIB, event)


@pytest.mark.parametrize(
    ("savings", "num_mib"),
    [
        ([], 0),
        ([(5, 6, 1)], 1),
        ([(5, 6, 3)], 2),  # 8 MiB stay from event 6 on
        ([(5, 8, 3)], 3),
        ([(5, 8, 8)], 4),  # 6 MiB before
        ([(5, 8, 8), (2, 4, 4)], 8),
        ([(5, 8, 2), (5, 8, 3)], 4),
        ([(1, 5, 6)], 0),
        ([(6, 8, 8)], 0),
    ],
)
def test_the_peak_is_lower_by_as_much_as_no_other_moment_needs(
    savings: Sequence[tuple[int, int, int]], num_mib: int
) -> None:
    saved = overlapping().peak_reduction([Saving(begin, end, mib * MIB) for begin, end, mib in savings])
    assert saved == num_mib * MIB


def test_a_share_of_each_storage_is_saved_while_it_lives() -> None:
    lifetimes = overlapping()
    assert lifetimes.savings([1, 3]) == [Saving(2, 4, 4 * MIB), Saving(5, 8, 8 * MIB)]
    assert lifetimes.savings([1, 2], 0.25) == [Saving(2, 4, MIB), Saving(3, 8, 0)]


@pytest.mark.parametrize(
    ("num_kept", "oldest", "saved"),
    [
        (0, False, [(1, 2, 2), (2, 4, 6), (4, 5, 2), (5, 6, 10), (6, 8, 8)]),
        (1, False, [(2, 4, 2), (5, 6, 2)]),
        (1, True, [(2, 4, 4), (5, 6, 8)]),
        (2, False, []),
    ],
)
def test_what_is_live_beyond_some_sets(num_kept: int, oldest: bool, saved: list[tuple[int, int, int]]) -> None:
    found = overlapping().savings_beyond([[0], [1], [3]], num_kept, oldest=oldest)
    assert found == [Saving(begin, end, mib * MIB) for begin, end, mib in saved]


def test_a_set_lives_from_its_first_storage_to_its_last() -> None:
    assert overlapping().savings_beyond([[1, 3]], 0) == [Saving(2, 8, 12 * MIB)]


def test_the_most_is_live_before_it_is_freed() -> None:
    b = TraceBuilder()
    first = b.alloc(8 * MIB)
    b.free(first)
    b.alloc(2 * MIB)
    assert b.context().lifetimes.find_max_live([0, 1]) == LiveSet(8 * MIB, 1, (0,))
