"""Gradients of parameters that no optimizer has, in hand-written traces: each size is worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from memprof.findings import Finding
from memprof.findings.edits import Edit, EditKind
from memprof.findings.untrained_gradients import find
from memprof.trace.events import NONE, FirstStep, Forward, InnerCall, Owner, PhaseKind, Role, UntrainedSpan
from memprof.units import MIB
from tests.unit.traces import TraceBuilder

CALL = "train.py:5 main"


def program(
    gradient_bytes: int = 128 * MIB, saved_bytes: int = 0, *, other_bytes: int = 512 * MIB, num_steps: int = 2
) -> TraceBuilder:
    """Steps with a call that makes a tensor of `saved_bytes`, and a backward that needs as much again."""
    b = TraceBuilder()
    b.alloc(other_bytes, owner=(Role.PARAMETER, "weight"))
    uses = {}
    gradient = NONE
    for step in range(1, num_steps + 1):
        b.phase(PhaseKind.FORWARD, step)
        begin = len(b.trace.events)
        b.enter("", "Target")
        saved = b.alloc(saved_bytes, op="aten.relu", line="model.py:3 forward")
        used = len(b.trace.events)
        b.leave()
        end = len(b.trace.events)
        b.trace.forwards.append(Forward(begin, end, 0, b._index(b.trace.sources, CALL), True, 2, ()))
        if saved_bytes:
            b.trace.untrained_spans.append(UntrainedSpan(begin, end, (saved,), (used,)))
        b.phase(PhaseKind.BACKWARD, step)
        if gradient == NONE:
            gradient = b.alloc(gradient_bytes, owner=(Role.GRADIENT, "head.weight"), forward_event=begin + 1)
        temporary = b.alloc(saved_bytes)
        uses[gradient] = uses[saved] = len(b.trace.events)
        b.free(saved, temporary)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
    b.trace.untrained_gradients = [gradient]
    b.trace.last_uses = [uses.get(index, NONE) for index in range(len(b.trace.storages))]
    return b


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


@pytest.mark.parametrize(
    ("callers", "place"), [((), "train.py:5"), ((9,), "train.py:5"), ((9, 8), "train.py:5 from train.py:9")]
)
def test_a_function_that_calls_several_models_is_told_with_its_caller(callers: tuple[int, ...], place: str) -> None:
    b = program(saved_bytes=256 * MIB)
    called = b.trace.forwards
    for index, call in enumerate(called):
        number = callers[index % len(callers)] if callers else None
        caller = NONE if number is None else b._index(b.trace.sources, f"train.py:{number} main")
        called[index] = call._replace(caller=caller)
    assert f"of Target, called at {place}, gets" in only(find(b.context())).title


def test_what_is_freed_and_what_to_change() -> None:
    finding = only(find(program(saved_bytes=256 * MIB).context()))
    assert finding.num_bytes == 384 * MIB
    told = "1 parameter of Target, called at train.py:5, gets a gradient that no optimizer uses: 128.00 MiB"
    assert finding.title == told
    fix, effect, gradient, saved = finding.evidence
    assert "torch.no_grad() at train.py:5, or call requires_grad_(False) on `head`;" in fix.text
    assert effect.text.endswith("and reserves 768.00 MiB instead of 1.12 GiB")
    assert effect.required_bytes == 768 * MIB
    assert gradient.text.startswith("gradient: [134217728]") and saved.text.startswith("saved: [268435456]")
    assert finding.edit == Edit(EditKind.NO_GRADIENTS, CALL) and not finding.is_decisive
    decisive = only(find(program(saved_bytes=256 * MIB).context(800 * MIB)))
    assert decisive.is_decisive


def test_a_call_that_leads_to_a_trained_parameter_is_no_call_for_no_grad() -> None:
    b = program(saved_bytes=256 * MIB)
    b.trace.untrained_spans = [span._replace(end=span.end - 1) for span in b.trace.untrained_spans]
    finding = only(find(b.context()))
    assert finding.evidence[0].text.startswith("fix: call requires_grad_(False) on `head`, where the model is built;")
    assert finding.edit is None and finding.evidence[0].source is None


@pytest.mark.parametrize(("num_bytes", "told"), [(62 * MIB, []), (64 * MIB, [64 * MIB]), (66 * MIB, [66 * MIB])])
def test_least_bytes(num_bytes: int, told: list[int]) -> None:
    assert [finding.num_bytes for finding in find(program(num_bytes).context())] == told


@pytest.mark.parametrize(("num_bytes", "told"), [(98 * MIB, []), (100 * MIB, [100 * MIB]), (102 * MIB, [102 * MIB])])
def test_least_share_of_the_peak(num_bytes: int, told: list[int]) -> None:
    context = program(num_bytes, other_bytes=2000 * MIB - num_bytes).context()
    assert [finding.num_bytes for finding in find(context)] == told


@pytest.mark.parametrize(("num_steps", "is_told"), [(1, False), (2, True), (3, True)])
def test_in_the_first_step_an_optimizer_may_be_missing_yet(num_steps: int, is_told: bool) -> None:
    assert bool(find(program(num_steps=num_steps).context())) == is_told


@pytest.mark.parametrize(("num_steps", "waits", "is_told"), [(0, False, False), (1, False, True), (1, True, False)])
def test_where_memory_runs_out_no_optimizer_is_to_come_but_one_that_waits(
    num_steps: int, waits: bool, is_told: bool
) -> None:
    b = program(num_steps=1)
    kinds = [PhaseKind.OTHER if phase.kind is PhaseKind.OPTIMIZER_STEP else phase.kind for phase in b.trace.phases]
    if not num_steps:
        b.trace.phases = [phase._replace(kind=kind) for phase, kind in zip(b.trace.phases, kinds, strict=True)]
    b.trace.ended_out_of_memory = True
    b.trace.first_steps = [FirstStep((0,), (NONE,), (2,))] * waits
    assert bool(find(b.context())) == is_told


@pytest.mark.parametrize(
    ("name", "words"), [("body.0", "`head`"), ("head.lora", "the parameters of `head` that are not trained")]
)
def test_parts_with_adapters_are_not_frozen_as_a_whole(name: str, words: str) -> None:
    b = program()
    b.trace.owners[0] = Owner(Role.PARAMETER, name)
    assert f"requires_grad_(False) on {words}, where" in only(find(b.context())).evidence[0].text


def test_a_gradient_that_is_read_outside_of_a_backward() -> None:
    b = program()
    b.trace.last_uses[b.trace.untrained_gradients[0]] = len(b.trace.events)
    assert not find(b.context())


def test_a_result_of_a_call_may_be_kept_by_the_program() -> None:
    b = program(saved_bytes=256 * MIB)
    call = b.trace.forwards[0]
    b.trace.forwards[0] = call._replace(outputs=tuple(i for span in b.trace.untrained_spans for i in span.storages))
    assert only(find(b.context())).num_bytes == 128 * MIB


def test_what_is_given_to_a_call_lives_until_its_end() -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.alloc(512 * MIB)
    begin = len(b.trace.events)
    saved = b.alloc(256 * MIB)
    b.enter("")
    used = len(b.trace.events)
    inner = b.alloc(256 * MIB)
    b.leave()
    b.trace.untrained_spans = [UntrainedSpan(begin, len(b.trace.events), (saved,), (used,))]
    b.free(inner)
    gradients = []
    uses = {}
    for step in (1, 2):
        b.phase(PhaseKind.BACKWARD, step)
        gradients.append(b.alloc(128 * MIB))
        uses[saved] = len(b.trace.events)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
    b.trace.untrained_gradients = gradients
    b.trace.last_uses = [uses.get(index, NONE) for index in range(len(b.trace.storages))]
    assert not find(b.context())  # all three are live together in the call, as before


def copied(*, child: str = "Linear", ended: bool = True) -> TraceBuilder:
    """A model calls its part `online`, and then `target`, with a child of the class `child`, of whose parameters no
    optimizer has any; memory runs out in that call."""
    b = TraceBuilder()
    b.alloc(256 * MIB, owner=(Role.PARAMETER, "online.0.weight"))
    b.phase(PhaseKind.FORWARD)
    begin = len(b.trace.events)
    b.enter("", "Byol")
    for path, name in (("online", "Linear"), ("target", child)):
        b.trace.inner_calls.append(
            InnerCall(len(b.trace.modules), b._index(b.trace.sources, f"byol.py:{len(path)} forward"))
        )
        start = len(b.trace.events)
        b.enter(path, "Sequential")
        b.enter(f"{path}.0", name)
        saved = b.alloc(256 * MIB, op="aten.relu", line="model.py:3 forward")
        b.leave()
        if path == "online":
            b.leave()
    b.trace.untrained_spans.append(UntrainedSpan(start, len(b.trace.events), (saved,), (len(b.trace.events) - 1,)))
    failed = Forward(begin, len(b.trace.events), 0, b._index(b.trace.sources, CALL), True, 2, ())
    b.trace.ended_out_of_memory, b.trace.failed_forward = ended, failed
    b.alloc(64 * MIB)
    b.trace.last_uses = [NONE] * len(b.trace.storages)
    return b


@pytest.mark.parametrize(("change", "is_told"), [({}, True), ({"child": "Conv2d"}, False), ({"ended": False}, False)])
def test_a_copy_of_what_is_trained_that_no_optimizer_has(change: dict[str, Any], is_told: bool) -> None:
    """Another network may be given to an optimizer after the first step, even in training mode."""
    findings = find(copied(**change).context(700 * MIB))
    assert bool(findings) == is_told
    if is_told:
        assert findings[0].title.startswith(
            "`target`, which is made as `online` is, is called at byol.py:6 with gradients, and no optimizer has"
        )
        assert findings[0].edit == Edit(EditKind.NO_GRADIENTS, "byol.py:6 forward")
