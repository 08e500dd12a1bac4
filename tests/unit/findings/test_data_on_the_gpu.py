"""Data that is on the GPU as a whole, of which each step takes some rows."""

from __future__ import annotations

from typing import Any

import pytest

from memprof.findings.proposals import host_memory
from memprof.trace.events import MovedModel, PhaseKind, Role
from memprof.units import MIB
from tests.unit.traces import TraceBuilder


def steps_on(
    *rows: int,
    columns: int = 1024,
    other_rows: int = 8,
    other_columns: int = 1024,
    role: Role | None = Role.INPUT,
    phase: PhaseKind = PhaseKind.INPUTS,
    module: str = "",
) -> TraceBuilder:
    """Data of so many rows, and a forward with 8 of them."""
    b = TraceBuilder(phase)
    if module:
        b.enter(module)
    for number, count in enumerate(rows):
        b.new(count, columns, op="aten._to_copy", line=f"train.py:{number + 1} main", owner=role and (role, ""))
    if module:
        b.leave()
    b.phase(PhaseKind.FORWARD)
    b.new(other_rows, other_columns, line="model.py:1 forward")
    return b


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        ({}, True),
        ({"role": None}, True),
        ({"role": Role.PARAMETER}, False),
        ({"module": "embed"}, False),
        ({"phase": PhaseKind.FORWARD}, False),
        ({"other_rows": 100}, False),  # the model is given all rows
        ({"other_rows": 300, "other_columns": 10}, False),  # with others merged into them
        ({"other_rows": 99}, True),
        ({"other_rows": 8, "other_columns": 100}, False),
    ],
)
def test_by_its_use(change: dict[str, Any], is_told: bool) -> None:
    assert bool(list(host_memory.propose_data(steps_on(100, **change).context()))) == is_told


@pytest.mark.parametrize(("rows", "is_told"), [(63, False), (64, True), (65, True)])
def test_it_has_64_rows(rows: int, is_told: bool) -> None:
    assert bool(list(host_memory.propose_data(steps_on(rows).context()))) == is_told


@pytest.mark.parametrize(
    ("is_moving", "is_failed", "is_told"), [(True, True, False), (True, False, True), (False, True, True)]
)
def test_a_parameter_that_is_moved_is_no_data(is_moving: bool, is_failed: bool, is_told: bool) -> None:
    """Memory runs out with it, or with a small one."""
    b = TraceBuilder(PhaseKind.OTHER)
    b.new(4096, 1024, op="aten._to_copy", line="train.py:1 main")
    if not is_failed:
        b.new(1024, 1024, op="aten._to_copy", line="train.py:2 main")
    b.trace.ended_out_of_memory = True
    b.trace.moved_model = MovedModel("Net", 1, 1, "float32") if is_moving else None
    assert bool(list(host_memory.propose_data(b.context((8 if is_failed else 18) * MIB)))) == is_told


@pytest.mark.parametrize(("other_rows", "is_told"), [(299, True), (301, False)])
def test_it_is_a_quarter_of_the_peak(other_rows: int, is_told: bool) -> None:
    b = steps_on(100, other_rows=other_rows)
    assert bool(list(host_memory.propose_data(b.context()))) == is_told


def test_inputs_and_labels_go_together() -> None:
    b = steps_on(100, 100, 70)
    (proposal,) = host_memory.propose_data(b.context())
    assert [storage.num_bytes > 0 for storage in proposal.trace.storages] == [False, False, True, True]
    assert proposal.change.startswith("keep [100 x 1024] at train.py:1 in host memory (.cpu()), and move the rows")


@pytest.mark.parametrize(
    ("num_bytes", "op", "is_told"),
    [(8 * MIB, "aten.index", False), (8 * MIB - 512, "aten.index", True), (8 * MIB - 512, "aten._to_copy", False)],
)
def test_windows_are_made_of_less(num_bytes: int, op: str, is_told: bool) -> None:
    """They take 64 MiB, and what is there when they are made so many."""
    b = TraceBuilder(PhaseKind.INPUTS)
    b.alloc(num_bytes, op="aten._to_copy")
    b.new(16384, 1024, op=op, line="train.py:2 main")
    b.phase(PhaseKind.FORWARD)
    b.new(8, 1024)
    (proposal,) = host_memory.propose_data(b.context())
    assert proposal.change.startswith("make the rows of one step at a time") == is_told
