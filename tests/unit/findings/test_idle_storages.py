"""Which storages are idle, function by function: phases, last uses and batches."""

from __future__ import annotations

from typing import Any

import pytest

from memprof.findings.idle_storages import awaits_backward, find_idle_storages, find_phase
from memprof.trace.events import Forward, PhaseKind, Role
from memprof.units import MIB
from tests.unit.findings.idle import OUT, UsesBuilder, exits
from tests.unit.traces import TraceBuilder


def given_cache(*, held: bool = True, forwards: int = 1, num_before: int = 1) -> UsesBuilder:
    """A generation has given tensors of 100 MiB to the model, one after another; then it is trained."""
    b = UsesBuilder(PhaseKind.MODEL)
    given = [b.alloc(100 * MIB, owner=(Role.INPUT, "")) for _ in range(num_before)]
    for cache in given:
        b.phase(PhaseKind.FORWARD)
        b.use(cache)
    for step in range(1, 1 + forwards):
        b.phase(PhaseKind.FORWARD, step)
        activation = b.alloc(300 * MIB)
        b.phase(PhaseKind.BACKWARD, step)
        b.use(activation)
        b.free(activation)
    if held:
        b.trace.idle_holders.append(OUT._replace(name="Decoder._cache", storages=(given[0],)))
    return b


def test_what_was_given_to_a_model_and_is_kept_over_a_later_forward() -> None:
    (finding,) = given_cache().find()
    assert finding.num_bytes == 100 * MIB and "attribute `Decoder._cache`" in finding.title


@pytest.mark.parametrize(
    "other", [{"held": False}, {"num_before": 2}, {"forwards": 0}], ids=["no holder", "one of a list", "last forward"]
)
def test_silent_on_batches(other: dict[str, Any]) -> None:
    """Of a later forward, only one that has ended counts: here memory runs out in it."""
    b = given_cache(**other)
    if other == {"forwards": 0}:
        b.phase(PhaseKind.FORWARD, 2)
        b.alloc(300 * MIB)
        b.trace.ended_out_of_memory = True
    assert not b.find(350 * MIB)


@pytest.mark.parametrize(
    ("used", "kind"), [(0, PhaseKind.MODEL), (1, PhaseKind.MODEL), (3, PhaseKind.MODEL), (4, PhaseKind.FORWARD)]
)
def test_a_use_is_of_the_phase_that_was_running_before_it(used: int, kind: PhaseKind) -> None:
    """The forward begins at event 3: what is used after three events was used before it."""
    b = TraceBuilder()
    for _ in range(2):
        b.alloc(MIB)
    b.phase(PhaseKind.FORWARD)
    assert find_phase(b.context().phases, used).kind is kind


@pytest.mark.parametrize("before_free", [False, True])
def test_what_dies_as_the_next_phase_begins_is_no_more_idle(before_free: bool) -> None:
    b = UsesBuilder(PhaseKind.FORWARD)
    out = b.alloc(100 * MIB)
    b.use(out)
    if before_free:
        b.free(out)
    b.phase(PhaseKind.FORWARD, 2)
    if not before_free:
        b.free(out)
    assert find_idle_storages(b.context()) == [out] * (not before_free)


@pytest.mark.parametrize(
    ("change", "is_idle"),
    [
        ({}, True),
        ({"device": "cpu"}, False),
        ({"hidden": True}, False),
        ({"next": PhaseKind.OTHER}, False),
        ({"next": PhaseKind.DECODE}, True),
        ({"next": PhaseKind.EVALUATION}, True),
    ],
)
def test_idle_storages_are_on_the_gpu_when_a_phase_computes(change: dict[str, Any], is_idle: bool) -> None:
    b = UsesBuilder(PhaseKind.FORWARD)
    following = change.pop("next", PhaseKind.FORWARD)
    out = b.alloc(100 * MIB, **change)
    b.use(out)
    b.phase(following, 2)
    b.alloc(MIB)
    b.phase(PhaseKind.OTHER, 2)
    b.free(out)
    b.use()
    assert find_idle_storages(b.context()) == [out] * is_idle


@pytest.mark.parametrize(
    ("second", "is_idle"),
    [(PhaseKind.FORWARD, True), (PhaseKind.DECODE, True), (PhaseKind.EVALUATION, True), (PhaseKind.BACKWARD, False)],
)
def test_a_batch_is_idle_after_a_whole_pass_that_goes_forward(second: PhaseKind, is_idle: bool) -> None:
    b = UsesBuilder(PhaseKind.MODEL)
    batch = b.alloc(100 * MIB, owner=(Role.INPUT, ""))
    b.phase(PhaseKind.FORWARD)
    b.use(batch)
    b.alloc(MIB)
    b.phase(second, 2)
    b.alloc(MIB)
    b.phase(PhaseKind.OPTIMIZER_STEP, 2)
    b.use()
    b.trace.idle_holders.append(OUT._replace(storages=(batch,)))
    assert find_idle_storages(b.context()) == [batch] * is_idle


def test_a_batch_that_is_freed_as_the_pass_ends_is_not() -> None:
    b = UsesBuilder(PhaseKind.MODEL)
    batch = b.alloc(100 * MIB, owner=(Role.INPUT, ""))
    b.phase(PhaseKind.FORWARD)
    b.use(batch)
    b.phase(PhaseKind.FORWARD, 2)
    b.alloc(MIB)
    b.free(batch)
    b.phase(PhaseKind.BACKWARD, 2)
    b.use()
    b.trace.idle_holders.append(OUT._replace(storages=(batch,)))
    assert not find_idle_storages(b.context())


def test_what_is_used_as_a_call_begins_was_used_before_it() -> None:
    b = UsesBuilder(PhaseKind.FORWARD)
    weight = b.parameter("weight", 100)
    b.alloc(MIB)
    b.use(weight)
    begin = len(b.trace.events)
    b.alloc(MIB)
    b.trace.forwards.append(Forward(begin, begin + 1, 0, 0, True, 0, ()))
    b.use()
    b.trace.ended_out_of_memory = True
    assert awaits_backward(b.context(), weight)  # the call itself has no graph


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_last_use_is_that_of_the_tensor_that_was_used_last(order: tuple[int, int]) -> None:
    b = UsesBuilder(PhaseKind.FORWARD)
    made = [b.alloc(50 * MIB, op=f"aten.op{number}") for number in range(2)]
    for step, number in enumerate(order, 1):
        b.phase(PhaseKind.EVALUATION, step)
        b.alloc(MIB)
        b.use(made[number])
    b.phase(PhaseKind.FORWARD, 3)
    b.free(b.alloc(300 * MIB))
    b.phase(PhaseKind.OTHER, 3)
    exits(b)
    b.trace.idle_holders.append(OUT._replace(storages=tuple(made)))
    (finding,) = b.find()
    assert finding.evidence[-1].text.endswith("of step 2")
