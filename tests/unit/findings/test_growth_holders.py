"""Who keeps what piles up, and how it is named."""

from __future__ import annotations

from typing import Any

import pytest

from memprof.findings import memory_growth
from memprof.findings.growth import (
    Key,
    LeakGroup,
    by_holder,
    describe_holder,
    find_holder,
    find_idle_holder,
    format_holders,
    holder_evidence,
    holder_fix_evidence,
    holder_key,
    is_running_sum,
    make_key,
    name_holders,
)
from memprof.trace.events import AUTOCAST_KIND, CycleKind, Holder, PhaseKind
from memprof.units import MIB
from tests.unit.findings.growing import LOSSES
from tests.unit.traces import TraceBuilder


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "list `losses`"),
        ({"kind": ""}, "variable `losses`"),
        ({"kind": "", "name": "self.losses"}, "attribute `self.losses`"),
        ({"name": "self.losses"}, "list `self.losses`"),
        ({"kind": CycleKind.OBJECTS, "name": "A.b -> A"}, "a reference cycle, A.b -> A"),
    ],
)
def test_a_holder_is_named_by_its_kind(change: dict[str, Any], text: str) -> None:
    holder = LOSSES._replace(**change)
    assert describe_holder(holder) == text
    assert format_holders(None, holder) == f", kept by {text} (x/train.py:9)"
    assert format_holders(holder._replace(fills=False)) == f", kept by {text}"
    assert format_holders(None) == ""
    twice = f", kept by {text} (x/train.py:9) and {text} (x/train.py:9)"
    assert format_holders(holder, holder) == twice


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({}, ", filled at x/train.py:9"),
        ({"fills": False}, " of x/train.py:9"),
        ({"source": None}, ""),
        ({"kind": CycleKind.OBJECTS}, ", closed at x/train.py:9"),
    ],
)
def test_the_line_of_a_holder(change: dict[str, Any], place: str) -> None:
    holder = LOSSES._replace(**change)
    evidence = holder_evidence(holder)
    assert evidence.text == f"kept by {describe_holder(holder)}{place}" and evidence.source == holder.source


@pytest.mark.parametrize(
    ("holder", "text"),
    [
        (None, "fix: drop it"),
        (LOSSES, "fix at x/train.py:9: drop it"),
        (LOSSES._replace(fills=False), "fix: drop it"),
        (LOSSES._replace(has_reset=True), "fix at x/train.py:9: call reset() at the end of each epoch, or drop it"),
        (LOSSES._replace(has_reset=True, nodes=3, kind=""), "fix at x/train.py:9: drop it"),  # a state with its graph
        (
            LOSSES._replace(has_reset=True, nodes=0, kind=""),
            "fix at x/train.py:9: call reset() at the end of each epoch, or drop it",
        ),
    ],
)
def test_the_fix_is_at_the_line_that_fills_the_holder(holder: Holder | None, text: str) -> None:
    evidence = holder_fix_evidence(holder, "drop it")
    assert evidence.text == text
    assert evidence.source == (LOSSES.source if " at " in text.partition(":")[0] else None)


def test_without_that_line_the_fix_is_at_the_line_that_makes_what_is_kept() -> None:
    unfilled = holder_fix_evidence(LOSSES._replace(fills=False), "drop it", "/x/train.py:4 main")
    assert unfilled.text == "fix at x/train.py:4: drop it" and unfilled.source == "/x/train.py:4 main"
    assert holder_fix_evidence(LOSSES, "drop it", "/x/train.py:4 main").source == LOSSES.source


@pytest.mark.parametrize("change", [{"kind": "dict"}, {"name": "outputs"}, {"source": "/x/train.py:10 main"}])
def test_holders_are_the_same_by_kind_name_and_line(change: dict[str, str]) -> None:
    assert holder_key(LOSSES) == holder_key(LOSSES._replace(event=5, storages=(1,), nodes=3))
    assert holder_key(LOSSES) != holder_key(LOSSES._replace(**change)) and holder_key(None) == ()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"kind": "", "node_steps": 2}, True),
        ({"kind": "", "node_steps": 1}, False),
        ({"kind": "list", "node_steps": 2}, False),
    ],
)
def test_a_running_sum_is_a_tensor_with_a_graph_of_several_steps(change: dict[str, Any], expected: bool) -> None:
    assert is_running_sum(LOSSES._replace(**change)) is expected


GRAPH = LOSSES._replace(storages=(1,), nodes=5, node_steps=2)


def leaking() -> tuple[TraceBuilder, LeakGroup, set[Key]]:
    """Three kinds of tensors; the leak is the first of them, and leaks are the first two."""
    b = TraceBuilder()
    made = [b.alloc(MIB, op=op) for op in ("aten.a", "aten.b", "aten.c", "aten.a")]
    keys = [make_key(b.trace, index) for index in made]
    return b, LeakGroup(keys[0], (0,), MIB, MIB), {keys[0], keys[1]}


@pytest.mark.parametrize(
    ("holders", "expected"),
    [
        ([], None),
        ([LOSSES._replace(storages=(2,))], None),
        ([LOSSES._replace(storages=(1,))], None),  # which has no graph
        ([LOSSES._replace(storages=(1,), nodes=5)], 0),
        ([LOSSES._replace(storages=(2,), nodes=5)], None),
        ([LOSSES._replace(kind="", nodes=5, node_steps=2)], 0),
        ([LOSSES._replace(kind="", nodes=0, node_steps=2)], None),
        ([LOSSES._replace(storages=(1,), nodes=5), LOSSES._replace(name="a", storages=(0,))], 1),
        ([LOSSES._replace(storages=(0,)), LOSSES._replace(name="a", storages=(0, 3))], 1),
        ([GRAPH._replace(nodes=9, node_steps=1), GRAPH._replace(name="a")], 1),
        ([GRAPH._replace(nodes=9), GRAPH._replace(name="a")], 0),
    ],
)
def test_who_keeps_a_leak(holders: list[Holder], expected: int | None) -> None:
    """Who has its kind, most of it; else who has the largest graph of a leak, or of a sum."""
    b, leak, keys = leaking()
    b.trace.holders = holders
    assert find_holder(b.trace, leak, keys) == (None if expected is None else holders[expected])


def test_the_observation_with_the_most_nodes_stands_for_a_holder() -> None:
    b, leak, _ = leaking()
    other = LeakGroup(make_key(b.trace, 2), (2,), MIB, MIB)
    b.trace.holders = [
        LOSSES._replace(storages=(0,), nodes=2),
        LOSSES._replace(storages=(), nodes=7),
        LOSSES._replace(name="a", nodes=9),
    ]
    # The other leak is of no holder, and is taken for what its graph has saved.
    assert by_holder(b.trace, [leak, other]) == {b.trace.holders[1]: [leak, other]}
    b.trace.holders = b.trace.holders[:1]
    b.trace.holders[0] = LOSSES._replace(storages=(0,))
    assert by_holder(b.trace, [leak, other]) == {b.trace.holders[0]: [leak], None: [other]}


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((), None),
        ((((2,), "list"),), None),
        ((((0,), "list"), ((0, 1, 2), "dict")), 1),
        ((((0,), "list"), ((0, 1), AUTOCAST_KIND)), 0),
    ],
)
def test_what_was_seen_to_keep_most_unused(
    kinds: tuple[tuple[tuple[int, ...], str], ...], expected: int | None
) -> None:
    b = TraceBuilder()
    b.trace.idle_holders = [LOSSES._replace(kind=kind, storages=storages) for storages, kind in kinds]
    found = find_idle_holder(b.trace, [0, 1])
    assert found == (None if expected is None else b.trace.idle_holders[expected])


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ({}, ["A.p['x']", "A.p['y']"]),
        ({"source": "/x/train.py:10 main"}, ["A.p['x']"]),  # another line makes tensors of its own
        ({"node_steps": 3}, ["A.p['x']"]),
    ],
)
def test_what_one_line_carries_on_for_several_is_one_cause(other: dict[str, Any], names: list[str]) -> None:
    """A line makes two kinds of tensors a step; the graph of a sum has either, and the last of each is a sum itself."""
    b = TraceBuilder()
    for step in range(1, 6):
        b.phase(PhaseKind.FORWARD, step)
        made = [b.alloc(size * MIB, line="train.py:9 main", op=op) for size, op in ((8, "aten.sub"), (4, "aten.mm"))]
        b.phase(PhaseKind.BACKWARD, step)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
    sum_of = LOSSES._replace(kind="", nodes=5, node_steps=2)
    b.trace.holders = [
        sum_of._replace(name="A.p['x']", storages=(made[0],)),
        sum_of._replace(name="A.p['y']", storages=(made[1],), **other),
    ]
    (finding, *others) = memory_growth.find(b.context())
    assert [name for name in ("A.p['x']", "A.p['y']") if name in finding.title] == names
    assert len(others) == 2 - len(names)
    assert ("12.00 MiB a step" in finding.title) == (len(names) == 2)


@pytest.mark.parametrize(("number", "text"), [(2, "`p['0']` (x/train.py:9) or"), (3, "`p[...]` (x/train.py:9)")])
def test_more_than_two_items_of_one_container_are_named_together(number: int, text: str) -> None:
    holders = [LOSSES._replace(kind="", name=f"p['{place}']") for place in range(number)]
    assert text in format_holders(*holders, word="or")
    assert format_holders(*holders, word="or").count("p[") == (number if number == 2 else 1)


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ((3,), "list `aaa`"),
        ((19, 19), f"list `{'a' * 19}` and list `{'a' * 19}`"),  # 52 characters of names, with "list" and quotes
        ((19, 20), f"list `{'a' * 19}` and 1 more"),
        ((1, 1, 1), "list `a` and list `a` and 1 more"),
        ((37, 1, 1), f"list `{'a' * 37}` and list `a` and 1 more"),
        ((38, 1, 1), f"list `{'a' * 38}` and 2 more"),
    ],
)
def test_a_row_names_two_holders_at_most(lengths: tuple[int, ...], text: str) -> None:
    holders = [LOSSES._replace(name="a" * length) for length in lengths]
    assert name_holders(holders) == text
