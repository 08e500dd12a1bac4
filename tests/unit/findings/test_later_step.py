"""A step that needs more than all before it: what is new in it, and thresholds, by hand."""

from __future__ import annotations

import pytest

from memprof.findings.finding import Finding, Severity
from memprof.findings.later_step import find
from memprof.spec import TargetSpec
from memprof.trace.events import Caller, Forward, Module, ModuleRole, PhaseKind
from memprof.units import MIB
from tests.unit.traces import TraceBuilder

PENALTY = "x/train.py:9 main"


def steps(*penalties: int, usual: int = 60 * MIB, line: str = PENALTY, held: int = 0) -> TraceBuilder:
    """Each step computes with `usual` bytes, and with those of its penalty, if any; `held` more stay after each."""
    b = TraceBuilder()
    for step, penalty in enumerate(penalties, 1):
        b.phase(PhaseKind.FORWARD, step)
        made = [b.alloc(usual)]
        made += [b.alloc(penalty, line=line)] if penalty else []
        b.phase(PhaseKind.BACKWARD, step)
        b.free(*made)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
        if held:
            b.alloc(held)
    return b


def found(b: TraceBuilder, usable_bytes: int | None = None) -> Finding | None:
    return next(iter(find(b.context(usable_bytes))), None)


def test_the_line_that_runs_for_the_first_time_and_what_it_makes() -> None:
    finding = found(steps(0, 0, 0, 40 * MIB), 80 * MIB)
    assert finding is not None
    assert finding.title == (
        "Step 4 allocates 100.00 MiB, the steps before it 60.00 MiB at most: it is the first that runs x/train.py:9"
    )
    assert (finding.num_bytes, finding.severity, finding.is_decisive) == (40 * MIB, Severity.WARNING, True)
    assert finding.evidence[0].source == PENALTY


def test_what_runs_after_a_step_is_none_of_it() -> None:
    """As the export of what was trained: the last step is one of those before it."""
    b = steps(0, 0, 40 * MIB)
    b.phase(PhaseKind.OTHER, 3)
    b.alloc(200 * MIB, line="x/train.py:12 export")
    finding = found(b, 100 * MIB)
    assert finding is not None
    assert finding.title == (
        "200.00 MiB are allocated after step 3, 100.00 MiB at most in the steps: x/train.py:12 runs for the first time"
    )
    assert "in parts, or in host memory" in finding.evidence[0].text and finding.is_decisive


@pytest.mark.parametrize(("calls", "nodes", "has_backward", "is_told"), [
    (2, 9, False, True), (1, 9, False, True), (2, 9, True, False),
])  # fmt: skip
def test_calls_with_gradients_may_have_no_backward(calls: int, nodes: int, has_backward: bool, is_told: bool) -> None:
    """As samples after a step, without torch.no_grad()."""
    b = steps(0, 0)
    b.trace.modules.append(Module("", "Net", ModuleRole.ROOT, ""))
    b.phase(PhaseKind.FORWARD, 3)
    for _ in range(calls):
        begin = len(b.trace.events)
        made = b.alloc(100 * MIB, line=PENALTY)
        source = b.trace.storages[made].source
        b.trace.forwards.append(Forward(begin, begin + 1, 0, source, True, nodes, ()))
    if has_backward:
        b.phase(PhaseKind.BACKWARD, 3)
    b.alloc(MIB, line=PENALTY)
    finding = found(b, 100 * MIB)
    assert finding is not None and ("torch.no_grad()" in finding.evidence[0].text) == is_told


def test_the_steps_before_it_have_the_most_of_any_of_them() -> None:
    finding = found(steps(0, 0, 0, 40 * MIB, held=2 * MIB), 63 * MIB)
    assert finding is not None and "Step 4 allocates 106.00 MiB, the steps before it 64.00 MiB" in finding.title
    assert not finding.is_decisive


def test_the_line_may_be_of_a_caller() -> None:
    b = steps(0, 0, 40 * MIB, line="train.py:1 main")  # which runs in each step
    b.trace.sources.append(PENALTY)
    b.trace.callers.append(Caller(3, len(b.trace.sources) - 1, ""))
    finding = found(b, 80 * MIB)
    assert finding is not None and "x/train.py:9" in finding.title


@pytest.mark.parametrize(("line_mib", "is_told"), [(4, False), (6, True), (8, True)])
def test_the_new_line_makes_a_twentieth_of_the_peak(line_mib: int, *, is_told: bool) -> None:
    """Of 120 MiB; what else is new comes of a line of all steps."""
    b = TraceBuilder()
    for step, new in enumerate((False, False, True), 1):
        b.phase(PhaseKind.FORWARD, step)
        made = [b.alloc(60 * MIB)]
        made += [b.alloc(line_mib * MIB, line=PENALTY), b.alloc((60 - line_mib) * MIB)] if new else []
        b.phase(PhaseKind.BACKWARD, step)
        b.free(*made)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
    assert (found(b, 80 * MIB) is not None) == is_told


@pytest.mark.parametrize(("penalty", "is_told"), [(18 * MIB, False), (20 * MIB, True), (22 * MIB, True)])
def test_a_quarter_of_the_peak_is_new(penalty: int, *, is_told: bool) -> None:
    assert (found(steps(0, 0, penalty), 70 * MIB) is not None) == is_told


@pytest.mark.parametrize(("earlier", "is_told"), [(1, False), (2, True), (3, True)])
def test_two_steps_came_before(earlier: int, *, is_told: bool) -> None:
    assert (found(steps(*[0] * earlier, 40 * MIB), 80 * MIB) is not None) == is_told


@pytest.mark.parametrize(("usable", "decides"), [(60, True), (58, False), (100, False)])
def test_it_decides_where_the_other_steps_fit(usable: int, *, decides: bool) -> None:
    finding = found(steps(0, 0, 40 * MIB), usable * MIB)
    assert finding is not None and finding.is_decisive == decides


def test_where_the_run_fits_it_is_a_note() -> None:
    finding = found(steps(0, 0, 40 * MIB), 200 * MIB)
    assert finding is not None and finding.severity is Severity.NOTE


def test_growth_is_no_such_step() -> None:
    assert found(steps(0, 0, 0, 0, held=40 * MIB), 80 * MIB) is None


def test_a_line_that_every_step_runs_is_none() -> None:
    assert found(steps(4 * MIB, 4 * MIB, 40 * MIB), 80 * MIB) is None


@pytest.mark.parametrize(("nodes", "is_told"), [(0, False), (1, True)])
def test_a_call_without_gradients_is_no_step(nodes: int, *, is_told: bool) -> None:
    b = steps(0, 0, 40 * MIB)
    b.trace.modules.append(Module("", "Net", ModuleRole.ROOT, ""))
    b.trace.forwards.append(Forward(0, len(b.trace.events), 0, 0, True, nodes, ()))
    assert (found(b, 80 * MIB) is not None) == is_told


def test_a_spec_has_no_program() -> None:
    context = steps(0, 0, 40 * MIB).context(80 * MIB, spec=TargetSpec(model="gpt2"))
    assert find(context) == []


@pytest.mark.parametrize(("nodes", "is_told"), [(149, False), (150, True), (151, True)])
def test_a_call_that_keeps_more_for_the_backward(nodes: int, *, is_told: bool) -> None:
    """Parameters were frozen in the first two steps: the call of the same line made 100 nodes."""
    b = TraceBuilder()
    b.trace.modules.append(Module("", "ViT", ModuleRole.ROOT, ""))
    for step, (num_bytes, own) in enumerate([(20, 100), (20, 100), (100, nodes)], 1):
        b.phase(PhaseKind.FORWARD, step)
        begin = len(b.trace.events)
        made = b.alloc(num_bytes * MIB)
        b.trace.forwards.append(Forward(begin, begin + 1, 0, 0, True, own, ()))
        b.phase(PhaseKind.BACKWARD, step)
        b.free(made)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
    finding = found(b, 60 * MIB)
    assert (finding is not None) == is_told
    if finding is not None:
        assert "the call of `ViT` at train.py:1 keeps what it makes" in finding.title
        assert finding.evidence == ()
