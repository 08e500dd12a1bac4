"""What counts as growth: curves, rounds, leaks, and the lines that tell of them."""

from __future__ import annotations

from typing import Any

import pytest

from memprof.findings import Context, growth
from memprof.findings.growth import (
    LeakGroup,
    compute_curve,
    compute_median_rise,
    count_idle_iterations,
    exhaustion_evidence,
    find_growing_storages,
    find_leaks,
    find_step_leaks,
    format_holders,
    is_growing,
    is_rising_constantly,
    leak_evidence,
    make_key,
)
from memprof.trace.events import PhaseKind, Role
from memprof.units import MIB
from tests.unit.findings.figures import figures
from tests.unit.findings.growing import KEPT, LOSSES, MILLION, kept, steps
from tests.unit.traces import TraceBuilder


@pytest.mark.parametrize(
    ("spare_bytes", "per_round", "lasts"),
    [
        (2 * MIB, MIB, "2"),
        (2 * MIB - 1, MIB, "1"),
        (MIB - 1, MIB, None),
        (0, MIB, None),
        (2 * MIB, 0, None),
        (10_000_000, 1, "10,000,000"),
        (10_000_001, 1, None),
    ],
)
def test_rounds_until_the_gpu_is_full_count_from_what_is_reserved(
    spare_bytes: int, per_round: int, lasts: str | None
) -> None:
    """4 MiB are allocated in a segment of 20 MiB."""
    b = TraceBuilder()
    b.alloc(4 * MIB)
    evidence = exhaustion_evidence(b.context(20 * MIB + spare_bytes), per_round, "call")
    assert (None if evidence is None else evidence.text) == (
        None if lasts is None else f"at this rate what is left of the GPU lasts for {lasts} more calls"
    )


def test_rounds_are_not_counted_without_a_gpu() -> None:
    b = TraceBuilder()
    b.alloc(MIB)
    assert exhaustion_evidence(b.context(), MIB, "call") is None


def lives(*spans: tuple[int, int, int]) -> Context:
    """Tensors of so many MiB, each allocated at an event and freed at another, which is 0 if it is not."""
    b = TraceBuilder()
    indices: dict[int, int] = {}
    for event in range(1, 1 + max(max(span[:2]) for span in spans)):
        for number, (birth, death, mib) in enumerate(spans):
            if birth == event:
                indices[number] = b.alloc(mib * MIB)
            elif death == event:
                b.free(indices[number])
    return b.context()


@pytest.mark.parametrize(("survivors_only", "curve"), [(False, [3, 4, 4]), (True, [0, 1, 4])])
def test_bytes_at_the_end_of_each_round(survivors_only: bool, curve: list[int]) -> None:
    """Rounds end with events 2, 4 and 6: 1 MiB stays from event 1 on, 2 until event 3, 3 from event 4 on, 7 until 6."""
    context = lives((1, 0, 1), (2, 3, 2), (4, 0, 3), (5, 6, 7), (7, 0, 9))
    found = compute_curve(context, [0, 1, 2, 3, 4], [2, 4, 6], survivors_only=survivors_only)
    assert found == [mib * MIB for mib in curve]


@pytest.mark.parametrize(
    ("curve", "num_idle", "expected"),
    [
        ([0, 1, 2], 0, True),
        ([0, 1, 2], 1, False),
        ([0, 1, 1], 0, False),  # one tensor waits for its successor
        ([0, 1, 2, 2], 0, False),  # a window of three
        ([0, 1, 2, 1, 2], 0, False),  # it is emptied
        ([5, 5, 5], 0, False),
        ([0, 0, 1, 1, 2, 2, 3, 3], 0, True),  # every second round
        ([0, 0, 1, 1, 2, 2, 2, 2], 0, False),
        ([0, 1, 1, 2, 2, 3], 1, True),
        ([0, 1, 1, 2, 2, 3], 2, False),
        ([0, 1, 1, 1, 2, 2, 2, 3, 3], 0, True),
        ([0, 1, 1, 1, 2, 2, 2, 3, 3], 2, True),
        ([0, 1, 1, 1, 2, 2, 2, 3, 3], 3, False),
        ([0, 1, 1, 2], 0, False),  # two rises may be two optimizers' steps, unless each iteration rises
        ([1, 2, 2, 2, 2], 0, False),
    ],
)
def test_rounds_that_allocate_nothing_are_fewer_than_between_two_rises(
    curve: list[int], num_idle: int, expected: bool
) -> None:
    assert is_growing(curve, num_idle) is expected


@pytest.mark.parametrize(("members", "num_idle"), [([0], 2), ([1], 2), ([2], 1), ([3, 0], 1), ([0, 4], 0)])
def test_rounds_after_that_of_the_newest(members: list[int], num_idle: int) -> None:
    """Rounds end with events 2, 4 and 6; there is an allocation at each event from 1 to 5."""
    context = lives(*((event, 0, 1) for event in range(1, 6)))
    assert count_idle_iterations(context, members, [2, 4, 6]) == num_idle


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([1, 2, 3, 4], True),
        ([2, 4, 6, 8], True),
        ([1, 2, 3], False),
        ([1, 2, 2, 3, 4], True),
        ([1, 2, 2, 3], False),
        ([1, 2, 4, 5], False),
        ([1, 2, 3, 4, 3], False),
    ],
)
def test_always_as_many_more_three_times_at_least(counts: list[int], expected: bool) -> None:
    b = TraceBuilder()
    live: list[int] = []
    members: list[int] = []
    ends: list[int] = []
    for count in counts:
        anew = [b.alloc(MIB) for _ in range(count)]
        b.free(*live)
        live = anew
        members += anew
        ends.append(len(b.trace.events) - 1)
    assert is_rising_constantly(b.context(), members, ends) is expected


@pytest.mark.parametrize(
    ("curve", "median", "each"),
    [
        ([0, 1, 3, 6], 2, 2),
        ([0, 5, 6, 7, 8], 1, 1),
        ([4, 4, 5, 7], 1, 1),  # from the first rise on; the lower of two
        ([0, 3, 3, 6], 3, 2),  # not each adds some: the mean
        ([0, 4, 4, 4, 8], 4, 2),
    ],
)
def test_what_a_round_adds_is_the_median_or_the_mean(curve: list[int], median: int, each: int) -> None:
    assert compute_median_rise(curve) == median
    assert growth._compute_bytes_per_iteration(curve) == each


@pytest.mark.parametrize(("first_mib", "is_leak"), [(6, True), (7, False)])
def test_a_joined_result_is_what_the_rounds_have_added(first_mib: int, is_leak: bool) -> None:
    """Five results, each by 2 MiB larger: they are a leak up to twice as much as five rounds add, 20 MiB."""
    b = TraceBuilder()
    made: list[int] = []
    ends = []
    for number in range(5):
        made.append(b.alloc((first_mib * 2 + 2 * number) * MIB, op="aten.stack"))
        b.free(*made[-2:-1])
        ends.append(len(b.trace.events) - 1)
    found = find_leaks(b.context(), made, ends)
    assert [(one.num_bytes, one.bytes_each, one.is_recreated) for one in found] == [(8 * MIB, 2 * MIB, True)] * is_leak


def test_leaks_by_line_operator_and_module_the_largest_first() -> None:
    b = TraceBuilder()
    made: list[int] = []
    ends = []
    for _ in range(4):
        for layer in range(2):
            b.enter(f"layers.{layer}")
            made.append(b.alloc(2 * MIB))
            b.leave()
        made += [b.alloc(10 * MIB), b.alloc(6 * MIB, op="aten.mul"), b.alloc(8 * MIB, line=KEPT)]
        ends.append(len(b.trace.events) - 1)
    found = find_leaks(b.context(), made, ends)
    assert [(one.num_bytes // MIB, one.bytes_each // MIB, len(one.storages)) for one in found] == [
        (30, 10, 4), (24, 8, 4), (18, 6, 4), (12, 4, 8),
    ]  # fmt: skip
    assert found[3].key == (found[0].key[0], found[0].key[1], "layers.*") and not found[0].is_recreated


def test_what_is_made_as_the_first_step_begins_is_of_the_steps() -> None:
    b = TraceBuilder(None)
    for step in range(1, 5):
        b.phase(PhaseKind.FORWARD, step)
        b.alloc(MIB)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
    (leaks,) = find_step_leaks(b.context()).values()
    assert [len(one.storages) for one in leaks] == [4]


@pytest.mark.parametrize(
    ("change", "is_leak"),
    [
        ({}, True),
        ({"device": "cpu"}, False),
        ({"hidden": True}, False),
        ({"owner": (Role.BUFFER, "a")}, False),
        ({"owner": (Role.INPUT, "a")}, True),
        ({"owner": (Role.GRADIENT, "a")}, True),  # all but the newest of this name
        ({"owner": (Role.PARAMETER, "a")}, True),
        ({"owner": (Role.OPTIMIZER_STATE, "a")}, False),
    ],
)
def test_what_may_pile_up(change: dict[str, Any], is_leak: bool) -> None:
    b = TraceBuilder()
    b.parameter("weight", 100)
    steps(b, 5, lambda step: [b.new(MILLION, line=KEPT, **change) for _ in range(2)] and None)
    found = [len(one.storages) for leaks in find_step_leaks(b.context()).values() for one in leaks]
    assert found == [9 if change == {"owner": (Role.GRADIENT, "a")} else 10] * is_leak


def test_state_and_gradients_of_models_that_are_built_in_training() -> None:
    b = TraceBuilder()
    b.parameter("weight", 100)

    def each(step: int) -> None:
        for role in (Role.PARAMETER, Role.OPTIMIZER_STATE, Role.GRADIENT):
            b.new(MILLION, op=f"aten.{role.name}", line=KEPT, owner=(role, f"{step}"))

    steps(b, 5, each)
    (leaks,) = find_step_leaks(b.context()).values()
    ops = {b.trace.op(b.trace.storages[one.storages[0]]) for one in leaks}
    assert ops == {"aten.PARAMETER", "aten.OPTIMIZER_STATE"}


@pytest.mark.parametrize(("num_models", "is_leak"), [(1, True), (2, False)])
def test_gradients_of_the_same_name_are_replaced_if_they_are_of_one_model(num_models: int, is_leak: bool) -> None:
    """Models that are trained in turn get their gradients one after another, and each keeps its own."""
    b = TraceBuilder()
    for _ in range(num_models):
        b.parameter("a", 100)
    gradients: list[int] = []
    steps(b, 5, lambda step: gradients.extend(b.new(MILLION, line=KEPT, owner=(Role.GRADIENT, "a")) for _ in "ab"))
    assert bool(find_step_leaks(b.context())) == is_leak


def test_the_rest_of_many_kinds_is_one_line() -> None:
    """Of eight kinds, from 1 to 8 MiB a step, six are shown."""
    b = TraceBuilder()
    made = [b.new(mib * MILLION, op=f"aten.op{mib}", line=KEPT) for mib in range(1, 9)]
    leaks = [LeakGroup(make_key(b.trace, index), (index, index), MIB, mib * MIB) for mib, index in enumerate(made, 1)]
    lines = leak_evidence(b.trace, leaks, "step")
    assert [line.num_bytes for line in lines] == [mib * MIB for mib in (8, 7, 6, 5, 4, 3, 3)]
    assert figures(lines[0].text) == ["[2097152]", "float32", "aten.op8", "train.py:7", "8.00 MiB", "2"]
    assert figures(lines[-1].text) == ["2", "3.00 MiB"] and lines[-1].text.endswith("more a step")
    assert len(leak_evidence(b.trace, leaks[:6], "step")) == 6


def test_the_largest_tensor_of_a_leak_is_shown_the_last_of_equal_ones() -> None:
    b = TraceBuilder()
    b.enter("layers.0")
    made = [b.new(*shape, line=KEPT) for shape in ((4, 4), (8, 8), (16, 4), (2, 2))]
    b.leave()
    (line,) = leak_evidence(b.trace, [LeakGroup(make_key(b.trace, made[0]), tuple(made), 1, 1)], "call")
    assert line.shape == (16, 4) and "in layers.* at train.py:7" in line.text and "more a call" in line.text


def test_what_steps_pile_up_counts_in_a_step_that_has_not_ended() -> None:
    b = kept(4)
    b.phase(PhaseKind.FORWARD, 5)
    late = [b.new(MILLION, line=KEPT), b.new(MILLION, line=KEPT)]
    b.new(MILLION, line="train.py:8 main")
    made = [index for index, one in enumerate(b.trace.storages) if b.trace.source_line(one) == KEPT]
    assert find_growing_storages(b.context()) == set(made) and set(late) < set(made)


def test_what_was_made_before_the_first_forward_counts_with_what_steps_pile_up() -> None:
    """As the first step's noise, which is kept by a graph like that of the others."""
    b = TraceBuilder()
    first = b.new(MILLION, line=KEPT)
    other = b.new(MILLION, line="train.py:8 main")
    steps(b, 5, lambda step: b.new(MILLION, line=KEPT) and None)
    found = find_growing_storages(b.context())
    assert first in found and other not in found


def test_models_that_are_built_in_training_are_no_growing_storages() -> None:
    b = TraceBuilder()
    b.parameter("weight", 100)
    steps(b, 5, lambda step: b.new(MILLION, line=KEPT, owner=(Role.PARAMETER, "a")) and None)
    context = b.context()
    assert find_step_leaks(context) and not find_growing_storages(context)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (2, ", kept by list `l0` (x/train.py:9) and list `l1` (x/train.py:9)"),
        (3, ", kept by list `l0` (x/train.py:9) and list `l1` (x/train.py:9) and list `l2` (x/train.py:9)"),
        (4, ", kept by list `l0` (x/train.py:9) and list `l1` (x/train.py:9) and 2 others"),
    ],
)
def test_a_title_names_three_holders_or_two_and_the_number_of_others(number: int, text: str) -> None:
    assert format_holders(*(LOSSES._replace(name=f"l{i}") for i in range(number))) == text
