"""Copies of a model's state that are read later, in hand-written traces."""

from __future__ import annotations

import pytest

from memprof.trace.events import PhaseKind
from memprof.units import MIB
from tests.unit.findings.idle import OUT, UsesBuilder, exits

COPY_LINE = "train.py:7 main"


def copied(
    *, made_before: bool = False, trained_on: bool = True, used: bool = False, op: str = "aten.clone"
) -> UsesBuilder:
    """A state of 200 MiB that is copied after the first step, or before it, beside a forward of 300 MiB."""
    b = UsesBuilder()
    weights = [b.parameter(f"{number}.weight", 100, MIB // 4) for number in range(2)]

    def copy() -> tuple[int, ...]:
        made = tuple(b.new(100 * MIB // 4, op=op, line=COPY_LINE) for _ in weights)
        b.use(*made)
        return made

    if made_before:
        b.phase(PhaseKind.OTHER, 0)
        made = copy()
    b.phase(PhaseKind.FORWARD)
    b.use(*weights)
    if trained_on:
        b.phase(PhaseKind.OPTIMIZER_STEP)
        b.use(*weights)
    b.phase(PhaseKind.EVALUATION, 0)
    b.use(*weights)
    if not made_before:
        made = copy()
    elif used:
        b.use(*made)
    for step in (2, 3):
        b.phase(PhaseKind.FORWARD, step)
        b.free(b.alloc(100 * step * MIB))
        b.use(*weights)
    holder = OUT._replace(kind="dict", name="best", source=COPY_LINE, storages=made, is_read_later=True)
    b.trace.idle_holders.append(holder)
    return b


def test_a_copy_of_the_state_that_is_read_later_belongs_to_the_host() -> None:
    (finding,) = copied().find()
    assert finding.title == (
        "200.00 MiB stay on the GPU after their last use: a copy of the model's state in dict `best` (train.py:7)"
    )
    fix = finding.evidence[0]
    assert (fix.source, finding.num_bytes) == (COPY_LINE, 200 * MIB) and "host memory" in fix.text
    assert not copied(op="torch.load").find()  # a checkpoint that is read later is no copy that the program made


@pytest.mark.parametrize(
    ("how", "is_told"),
    [
        ({"made_before": True}, True),  # the state to begin anew with
        ({"made_before": True, "used": True}, False),  # an average of weights
        ({"made_before": True, "trained_on": False}, False),  # it may wait for the first step's end
        ({"trained_on": False}, False),
    ],
)
def test_a_copy_is_idle_if_the_program_has_trained_on_without_it(how: dict[str, bool], is_told: bool) -> None:
    b = copied(**how)
    assert bool(b.find()) == is_told
    exits(b)
    assert b.find()


@pytest.mark.parametrize("failing_line", [COPY_LINE, "train.py:8 main"])
def test_a_copy_in_progress_when_memory_runs_out(failing_line: str) -> None:
    b = UsesBuilder()
    weights = [b.parameter(f"{number}.weight", 100, MIB // 4) for number in range(4)]
    for step, kind in ((1, PhaseKind.OPTIMIZER_STEP), (2, PhaseKind.FORWARD)):
        b.phase(kind, step)
        b.use(*weights)
    for _ in range(3):
        b.use(b.new(100 * MIB // 4, op="aten.clone", line=COPY_LINE))
    b.free(b.new(100 * MIB // 4, op="aten.clone", line=failing_line))
    b.trace.ended_out_of_memory = True
    found = b.find(720 * MIB)
    assert bool(found) == (failing_line == COPY_LINE)
    for one in found:
        assert one.is_decisive and "a copy of the model's state made at train.py:7" in one.title


@pytest.mark.parametrize(
    ("shape", "too_early", "is_told"),
    [
        ((100 * MIB // 4,), 0, True),
        ((100 * MIB // 4,), 1, False),  # not known to be unused until the second step
        ((100, MIB // 4), 0, False),  # of a model: an average that waits for its next update
    ],
)
def test_a_copy_that_is_read_again_at_the_end(shape: tuple[int, ...], too_early: int, is_told: bool) -> None:
    """As the state that a learning rate finder restores: on the host it takes nothing at the peak, in step 1."""
    b = UsesBuilder()
    weights = [b.parameter(f"{number}.weight", 100, MIB // 4) for number in range(2)]
    b.phase(PhaseKind.OTHER, 0)
    made = tuple(b.new(*shape, op="aten.clone", line=COPY_LINE) for _ in weights)
    b.use(*made)
    begins = []
    for step in (1, 2):
        b.phase(PhaseKind.FORWARD, step)
        begins.append(len(b.trace.events) - 1)
        b.free(b.alloc(300 * MIB))
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
        b.use(*weights)
    b.phase(PhaseKind.OTHER, 0)
    b.use(*weights, *made)
    name = "Finder.state"
    holder = OUT._replace(event=begins[0] + 1, name=name, storages=made, unused_until=begins[1] + 1 - too_early)
    b.trace.idle_holders.append(holder)
    exits(b)
    found = b.find()
    assert bool(found) == is_told
    for one in found:
        assert one.num_bytes == 200 * MIB and "last used" not in one.title
        assert "in host memory, the run allocates at most" in one.evidence[1].text


@pytest.mark.parametrize("is_followed", [True, False])
def test_an_unread_copy_that_nothing_was_seen_to_hold_where_memory_runs_out(is_followed: bool) -> None:
    """It is made after the second step; until the next forward begins, the program may be about to use it."""
    b = UsesBuilder()
    weights = [b.parameter(f"{number}.weight", 100, MIB // 4) for number in range(2)]
    for step in (1, 2):
        b.phase(PhaseKind.FORWARD, step)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
        b.use(*weights)
    b.phase(PhaseKind.OTHER, 2)
    made = [b.new(100 * MIB // 4, op="aten.clone", line=COPY_LINE) for _ in weights]
    b.use(*made)
    if is_followed:
        b.phase(PhaseKind.FORWARD, 3)
    b.use(*weights)
    b.alloc(300 * MIB)
    b.trace.ended_out_of_memory = True
    found = b.find(600 * MIB)
    assert len(found) == is_followed
    for one in found:
        assert one.is_decisive and one.num_bytes == 200 * MIB and one.evidence[0].source == COPY_LINE
        assert one.title.endswith("a copy of the model's state made at train.py:7")
