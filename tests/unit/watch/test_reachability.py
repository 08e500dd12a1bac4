"""What a program can still reach, and what only the garbage collector will free."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from memprof.watch.reachability import list_unreachable


class Node:
    """An object that may refer to others, and to itself."""

    part: Any


KEPT: list[Any] = []  # a variable of a module

_Made = tuple["weakref.ref[Node]", Any]  # an object, and what keeps it


def in_a_container() -> _Made:
    node = Node()
    return weakref.ref(node), {"nodes": [node]}


def in_a_module() -> _Made:
    node = Node()
    KEPT.append(node)
    return weakref.ref(node), None


def in_a_function() -> _Made:
    node = Node()
    return weakref.ref(node), lambda: node


def below_twenty_objects() -> _Made:
    node = outer = Node()
    for _ in range(20):
        inner, outer = outer, Node()
        outer.part = inner
    return weakref.ref(node), outer


def in_itself() -> _Made:
    node = Node()
    node.part = node
    return weakref.ref(node), None


def in_a_ring() -> _Made:
    node, other = Node(), Node()
    node.part, other.part = {"other": [other]}, lambda: node
    return weakref.ref(node), None


@pytest.fixture(autouse=True)
def _uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()
    KEPT.clear()


@pytest.mark.parametrize(
    ("make", "is_reachable"),
    [
        (in_a_container, True),
        (in_a_module, True),
        (in_a_function, True),
        pytest.param(below_twenty_objects, True, marks=pytest.mark.nightly),
        pytest.param(in_itself, False, marks=pytest.mark.nightly),  # each visits a million objects here
        pytest.param(in_a_ring, False, marks=pytest.mark.nightly),
    ],
)
def test_what_no_variable_leads_to(make: Callable[[], _Made], is_reachable: bool) -> None:
    found, keeper = make()
    unreachable = list_unreachable([found()])  # not in an `assert`, which pytest gives variables
    assert len(unreachable) == (not is_reachable)
    assert keeper is None or is_reachable


def test_each_value_is_told_apart() -> None:
    kept, dropped = in_a_container(), in_a_ring()
    assert [type(value) for value in list_unreachable([kept[0](), dropped[0]()])] == [Node]


@pytest.mark.nightly
def test_the_search_keeps_nothing() -> None:
    """Its own frames are among those that it looks at, and would keep what their variables have."""
    kept, _ = in_itself()
    list_unreachable([kept()])
    vars(kept()).clear()
    gone = kept()
    assert gone is None
