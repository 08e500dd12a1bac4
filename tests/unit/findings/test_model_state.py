"""A model that is too large for the GPU is the cause, however memory ran out."""

from __future__ import annotations

import pytest

from memprof.findings import Finding, model_state
from memprof.spec import TargetSpec
from memprof.trace.events import NONE, FirstStep, MovedModel, PhaseKind, Role
from memprof.units import MIB
from tests.unit.traces import TraceBuilder


def training(*rows: int, num_states: int = 2) -> TraceBuilder:
    """Parameters of 1 MiB a row, without gradients and state, when memory runs out."""
    b = TraceBuilder()
    parameters = tuple(b.parameter(f"layer.{i}.weight", n, 1 << 18) for i, n in enumerate(rows))
    b.phase(PhaseKind.FORWARD)
    b.alloc(1000 * MIB)
    b.trace.ended_out_of_memory = True
    nothing = (NONE,) * len(rows)
    b.trace.first_steps = [FirstStep(parameters, nothing, (num_states,) * len(rows))]
    return b


def found(b: TraceBuilder, usable_mib: int) -> list[Finding]:
    return model_state.find(b.context(usable_mib * MIB))


@pytest.mark.parametrize(("usable_mib", "is_cause"), [(399, True), (400, False)])
@pytest.mark.parametrize("num_states", [0, 2])
def test_parameters_gradients_and_state(usable_mib: int, is_cause: bool, num_states: int) -> None:
    """100 MiB of parameters and of gradients, and two states of as much; without state the half."""
    findings = found(training(30, 70, num_states=num_states), usable_mib - (2 - num_states) * 100)
    assert [(one.is_decisive, one.num_bytes) for one in findings] == [(True, (200 + 100 * num_states) * MIB)] * is_cause


@pytest.mark.parametrize(("rows", "is_named"), [((50, 50), True), ((49, 26, 25), False), ((100,), False)])
def test_a_parameter_that_is_half_of_all_is_named(rows: tuple[int, ...], is_named: bool) -> None:
    (finding,) = found(training(*rows), 300)
    share = "50% of the parameters: `layer.0.weight` [50 x 262144], made at model.py:1"
    assert finding.title == (
        f"Parameters, gradients and optimizer state alone take at least 400.00 MiB{f' ({share})' * is_named}: "
        "more than the 300.00 MiB that the GPU has for them"
    )


def test_a_run_that_did_not_end_there_or_was_only_inference_has_no_such_cause() -> None:
    b = training(100)
    b.trace.ended_out_of_memory = False
    assert not found(b, 300)
    b.trace.ended_out_of_memory, b.trace.first_steps = True, []
    assert not found(b, 300)


@pytest.mark.parametrize(("usable_mib", "is_cause"), [(399, True), (400, False)])
def test_a_model_by_name_is_run_to_its_end(usable_mib: int, is_cause: bool) -> None:
    """At its last step it has 100 MiB of parameters, as many of gradients, and two states; other tensors do not
    count, nor do scripts, whose steps may be of several models."""
    b = TraceBuilder()
    b.parameter("weight", 25, MIB)
    for step in (1, 2):
        b.phase(PhaseKind.BACKWARD, step)
        gradient = b.new(25, MIB, owner=(Role.GRADIENT, "weight"))
        activations = b.new(50, MIB)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
        if step == 1:
            for name in ("exp_avg", "exp_avg_sq"):
                b.new(25, MIB, owner=(Role.OPTIMIZER_STATE, name))
        b.free(gradient, activations)
    findings = model_state.find(b.context(usable_mib * MIB, spec=TargetSpec(model="x")))
    assert [(one.is_decisive, one.num_bytes) for one in findings] == [(False, 400 * MIB)] * is_cause
    assert all(
        one.title.startswith("Parameters, gradients and optimizer state alone take 400.00 MiB:") for one in findings
    )
    assert not found(b, 300)


@pytest.mark.parametrize(("usable_mib", "is_cause"), [(299, True), (300, False)])
def test_a_model_that_was_being_moved(usable_mib: int, is_cause: bool) -> None:
    b = training(100)
    b.trace.first_steps = []
    b.trace.moved_model = MovedModel("Net", 75 << 20, 300 * MIB, "float32")
    titles = [finding.title for finding in found(b, usable_mib)]
    expected = "Net has 78.64M parameters in float32, 300.00 MiB: more than the 299.00 MiB that the GPU has for them"
    assert titles == [expected] * is_cause


@pytest.mark.parametrize(
    ("num_mib", "usable_mib", "line", "is_named", "has_fix"),
    [
        (149, 290, "net.py:3 __init__", False, False),
        (150, 290, "net.py:3 __init__", True, False),
        (200, 199, "net.py:3 __init__", True, True),
        (200, 200, "net.py:3 __init__", True, False),  # others make the model too large
        (200, 199, "/lib/site-packages/net.py:3 __init__", True, False),
    ],
)
def test_a_parameter_with_half_of_the_bytes_is_named(
    num_mib: int, usable_mib: int, line: str, is_named: bool, has_fix: bool
) -> None:
    b = TraceBuilder()
    b.parameter("small", 10, MIB)
    b.new(num_mib, 1 << 18, line=line)
    b.trace.ended_out_of_memory = True
    b.trace.moved_model = MovedModel("Net", 1, 300 * MIB, "float32", "fc1.weight", (num_mib, 1 << 18), num_mib * MIB)
    (finding,) = found(b, usable_mib)
    assert (f"`fc1.weight` [{num_mib} x 262144], made at net.py:3" in finding.title) == (is_named and "lib" not in line)
    assert ("`fc1.weight`" in finding.title) == is_named
    assert [one.source for one in finding.evidence] == [line] * has_fix
    assert all("make `fc1.weight` smaller" in one.text for one in finding.evidence)


def test_of_several_optimizers_the_least_step_counts() -> None:
    """One that never steps may be there for nothing: 30 MiB of parameters with two states, and 70 MiB with none."""
    b = training(30, 70)
    first, second = b.trace.first_steps[0].parameters
    b.trace.first_steps = [FirstStep((first,), (NONE,), (2,)), FirstStep((second,), (NONE,), (0,))]
    assert [bool(found(b, usable_mib)) for usable_mib in (119, 120)] == [True, False]


def test_state_that_the_step_has_made_counts_and_that_of_other_models_does_not() -> None:
    """100 MiB each of the parameters, of their gradients, and of two states, of which the second is refused."""
    b = TraceBuilder()
    b.parameter("old.weight", 50, 1 << 18)
    b.phase(PhaseKind.OPTIMIZER_STEP)
    b.new(100, 1 << 18, op="aten.zeros_like", owner=(Role.OPTIMIZER_STATE, "exp_avg"))
    parameter = b.parameter("weight", 100, 1 << 18)
    b.phase(PhaseKind.OPTIMIZER_STEP)
    b.new(100, 1 << 18, op="aten.zeros_like", owner=(Role.OPTIMIZER_STATE, "exp_avg"))
    b.new(100, 1 << 18, op="aten.zeros_like")
    b.trace.ended_out_of_memory = True
    b.trace.first_steps = [FirstStep((parameter,), (NONE,), (1,))]
    assert [bool(found(b, usable_mib)) for usable_mib in (399, 400)] == [True, False]
