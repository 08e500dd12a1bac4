"""What accumulates until the peak of a run, and is freed together after it, in traces that are counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from memprof.findings import growth_until_peak
from memprof.findings.growth import LeakGroup
from memprof.findings.growth_until_peak import (
    GrowthUntilPeak,
    find_growth_until_peak,
    find_piled_up_storages,
    list_growth_holders,
)
from memprof.trace.events import NONE, Forward, Holder, PhaseKind, Role
from memprof.units import MIB
from tests.unit.traces import TraceBuilder

LOSSES = Holder(0, "list", "losses", "/x/train.py:9 main", True, None, (), 0, 0, None)


@pytest.mark.parametrize(
    ("before", "after", "added_mib", "num_rounds"),
    [
        ((1, 1, 1, 1), (-4, 0), 3, 4),
        ((1, 1, 1), (-3, 0), None, None),  # two rises show nothing
        ((2, 1, 1, 1), (-5, 0), 4, 4),
        ((1, 1, -2, 1, 1, -2, 1, 1, 1, 1), (-4, 0), 3, 4),  # since they last became fewer
        ((1, 1, 1, 1, 1, 0), (-5, 0), None, None),  # the last round has added nothing
        ((1, 0, 1, 0, 1, 0, 1, 0), (-4, 0), 4, 4),  # nor has every second
        ((1, 1, 1, 1, 1), (-3, 0), 4, 5),  # half of it stays after the peak
        ((1, 1, 1, 1, 1), (-2, 0), None, None),  # more than half
        ((1, 1, 1, 1, 1), (), 4, 5),
    ],
)
def test_tensors_that_become_more_until_the_peak(
    before: Sequence[int], after: Sequence[int], added_mib: int | None, num_rounds: int | None
) -> None:
    """Each round allocates so many tensors of 1 MiB, or frees the oldest; the peak is at the begin of a round."""
    b = TraceBuilder()
    live: list[int] = []
    members: list[int] = []
    ends: list[int] = []
    for number, change in enumerate((*before, *(after or (0,)))):
        if number == len(before):
            b.free(b.alloc(100 * MIB))
        for _ in range(change):
            live.append(b.alloc(MIB))
            members.append(live[-1])
        b.free(*live[: max(-change, 0)])
        del live[: max(-change, 0)]
        b.empty_cache()
        ends.append(len(b.trace.events) - 1)
    found = growth_until_peak._find_stretch(b.context(), (0, 0, None), members, ends)
    if added_mib is None:
        assert found is None
        return
    assert found is not None
    leak, rounds = found
    assert (leak.num_bytes, leak.bytes_each, rounds) == (added_mib * MIB, MIB, num_rounds)


@pytest.mark.parametrize(("part_mib", "num_rounds"), [(2, 5), (3, 6), (4, 6)])
def test_a_round_that_has_made_less_than_half_of_the_others_is_none(part_mib: int, num_rounds: int) -> None:
    """Five steps leave 6 MiB each, and memory is fullest in the sixth, which has made `part_mib`."""
    b = TraceBuilder()
    made: list[int] = []
    for step in range(1, 7):
        b.phase(PhaseKind.FORWARD, step)
        made.append(b.alloc((part_mib if step == 6 else 4) * MIB, line="train.py:7 main"))
        if step < 6:
            made.append(b.alloc(2 * MIB, line="train.py:8 main"))
            b.phase(PhaseKind.BACKWARD, step)
            b.phase(PhaseKind.OPTIMIZER_STEP, step)
    b.free(*made)
    b.phase(PhaseKind.OPTIMIZER_STEP, 6)
    b.phase(PhaseKind.OTHER, 6)
    growth = find_growth_until_peak(b.context())
    assert growth is not None and growth.rounds == num_rounds


def accumulating(number: int = 5, part_mib: int = 2, other_mib: int = 100) -> TraceBuilder:
    """Steps each of which leaves two tensors of half the size; after the peak all are freed."""
    b = TraceBuilder()
    made: list[int] = []
    for step in range(1, number + 3):
        b.phase(PhaseKind.FORWARD, step)
        if step == number + 1:
            b.free(b.alloc(other_mib * MIB))
            b.free(*made)
        if step <= number:
            made += [b.alloc(part_mib * MIB, line=f"train.py:{line} main") for line in (7, 8)]
        b.phase(PhaseKind.BACKWARD, step)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
        b.phase(PhaseKind.OTHER, step)
    return b


@pytest.mark.parametrize(("other_mib", "is_told"), [(300, True), (302, False)])
def test_all_of_it_is_at_least_a_twentieth_of_the_peak(other_mib: int, is_told: bool) -> None:
    """Two kinds grow by 8 MiB each, and have 20 MiB at the peak."""
    found = find_growth_until_peak(accumulating(other_mib=other_mib).context())
    assert (found is not None) == is_told


def test_the_rounds_and_what_keeps_the_tensors() -> None:
    b = accumulating()
    b.trace.holders.append(LOSSES._replace(storages=(0,)))
    context = b.context()
    found = find_growth_until_peak(context)
    assert found is not None and (found.unit, found.units, found.rounds) == ("step", "steps", 5)
    (known, unknown) = found.leaks
    assert (known, unknown) == (b.trace.holders[0], None)
    assert list_growth_holders(context) == [b.trace.holders[0]]


def test_what_piles_up_over_steps_is_all_that_is_made_alike() -> None:
    """Before and after the growth too; what grows from call to call is told only where the run does not fit."""
    b = accumulating()
    later = b.alloc(2 * MIB, line="train.py:7 main")
    b.alloc(2 * MIB, line="train.py:9 main")
    lines = [b.trace.source_line(b.trace.storages[i]) for i in sorted(find_piled_up_storages(b.context()))]
    assert lines == ["train.py:7 main", "train.py:8 main"] * 5 + ["train.py:7 main"]
    assert later in find_piled_up_storages(b.context())
    assert not find_piled_up_storages(accumulating(other_mib=302).context())
    assert not find_piled_up_storages(kept_by_calls().context(10 * MIB))


def test_what_grows_to_the_end_is_not_told_twice() -> None:
    b = TraceBuilder()
    for step in range(1, 7):
        b.phase(PhaseKind.FORWARD, step)
        b.alloc(2 * MIB)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
    assert find_growth_until_peak(b.context()) is None


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        ({}, True),
        ({"hidden": True}, False),
        ({"device": "cpu"}, False),
        ({"owner": (Role.BUFFER, "")}, False),
        ({"owner": (Role.INPUT, "")}, True),
    ],
)
def test_what_may_accumulate(change: dict[str, object], is_told: bool) -> None:
    b = TraceBuilder()
    made: list[int] = []
    for step in range(1, 8):
        b.phase(PhaseKind.FORWARD, step)
        if step == 6:
            b.free(b.alloc(20 * MIB))
            b.free(*made)
        if step < 6:
            made.append(b.alloc(2 * MIB, **change))
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
    assert (find_growth_until_peak(b.context()) is not None) == is_told


@pytest.mark.parametrize("fits", [True, False])
def test_rounds_are_steps_then_backward_passes_then_calls(fits: bool) -> None:
    """Calls are those of the module that is called most with gradients in training, where memory runs out."""
    b = TraceBuilder(None)
    for step in (1, 2):
        for micro_batch in (1, 2):
            b.phase(PhaseKind.FORWARD, step, micro_batch)
            b.alloc(MIB)
            b.phase(PhaseKind.BACKWARD, step, micro_batch)
            b.alloc(MIB)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
        b.alloc(MIB)
    b.phase(PhaseKind.OTHER, 2)
    calls = [(1, 2, 0, 5, True), (3, 4, 1, 5, True), (5, 6, 1, 5, True), (7, 8, 1, 0, True), (9, 10, 2, 5, False)]
    calls += [(11, 12, 2, 5, False), (13, 14, 2, 5, False), (15, 16, 1, 5, False)]
    calls += [(17, 18, 2, 5, False)] * 2
    b.trace.forwards = [
        Forward(begin, end, module, NONE, train, nodes, ()) for begin, end, module, nodes, train in calls
    ]
    rounds = list(growth_until_peak._list_rounds(b.context(None if fits else 2 * MIB)))
    # Events by twos: phases 0, 2, 4, 6, 8 (optimizer), 10, 12, 14, 16, 18 (optimizer), and 20.
    assert rounds == [("step", [9, 19]), ("backward pass", [3, 7, 13, 17]), ("call", [3, 5, 15])][: 2 if fits else 3]


def test_a_backward_pass_is_plural_by_es() -> None:
    assert GrowthUntilPeak("backward pass", 3, [], {}).units == "backward passes"
    assert GrowthUntilPeak("call", 3, [], {}).units == "calls"


def test_a_backward_pass_that_goes_on_later_ends_later() -> None:
    b = TraceBuilder(None)
    for micro_batch in (1, 2, 1):
        b.phase(PhaseKind.BACKWARD, 1, micro_batch)
        b.alloc(MIB)
    b.phase(PhaseKind.OTHER, 1)
    assert dict(growth_until_peak._list_rounds(b.context()))["backward pass"] == [3, 5]


def test_the_rounds_are_those_of_what_accumulates_longest() -> None:
    b = TraceBuilder()
    made: list[int] = []
    for step in range(1, 9):
        b.phase(PhaseKind.FORWARD, step)
        if step == 7:
            b.free(b.alloc(20 * MIB))
            b.free(*made)
        if step < 7:
            made += [b.alloc(2 * MIB, line=f"train.py:{line} main") for line in (7, 8) if step > line - 6]
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
    found = find_growth_until_peak(b.context())
    assert found is not None and found.rounds == 5
    (leaks,) = found.leaks.values()
    assert [len(leak.storages) for leak in leaks] == [5, 4]


def kept_by_calls() -> TraceBuilder:
    """Six calls with gradients, each of which leaves its input and its result."""
    b = TraceBuilder()
    for _ in range(6):
        b.phase(PhaseKind.FORWARD)
        begin = len(b.trace.events)
        b.alloc(2 * MIB, owner=(Role.INPUT, ""))
        b.alloc(2 * MIB, op="aten.mm")
        b.trace.forwards.append(Forward(begin, len(b.trace.events), NONE, NONE, True, 5, ()))
        b.phase(PhaseKind.OTHER)
    return b


def test_what_keeps_the_results_of_calls_is_one() -> None:
    """One backward frees all of them."""
    b = kept_by_calls()
    b.trace.holders.append(LOSSES._replace(storages=(1,)))
    found = find_growth_until_peak(b.context(10 * MIB))
    assert found is not None and found.unit == "call"
    assert [(holder, len(leaks)) for holder, leaks in found.leaks.items()] == [(b.trace.holders[0], 2)]


@pytest.mark.parametrize(
    ("other", "is_joined"),
    [({"nodes": 5}, True), ({"nodes": 4}, False), ({"nodes": 0}, False), ({"nodes": 10, "kind": "list"}, False)],
)
def test_graphs_about_as_large_keep_the_same(other: dict[str, Any], is_joined: bool) -> None:
    """Of two attributes one has 3 MiB of leaks and 10 nodes, the other 1 MiB."""
    main = LOSSES._replace(kind="", name="A.memory", nodes=10)
    second = LOSSES._replace(**{"kind": "", "name": "A.norm", **other})
    large, small = (LeakGroup((0, 0, None), (), size * MIB, size * MIB) for size in (3, 1))
    joined = growth_until_peak._join_states({second: [small], main: [large], None: [small]})
    assert joined[main] == ([large, small] if is_joined else [large]) and joined[None] == [small]
    assert joined[second] == ([] if is_joined else [small])
