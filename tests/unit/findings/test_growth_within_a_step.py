"""What piles up within a step, over its micro-batches or calls of the model."""

from __future__ import annotations

import pytest

from memprof.findings import Finding, Severity, memory_growth
from memprof.findings.edits import Edit, EditKind
from memprof.findings.memory_growth import find
from memprof.flows.account import analyze
from memprof.trace.events import NONE, Forward, GraphBackward, PhaseKind, Role
from memprof.trace.facts import DeviceFacts, Facts
from memprof.units import MIB
from tests.unit.findings.growing import KEPT, LOSSES, MILLION
from tests.unit.traces import TraceBuilder


def found(b: TraceBuilder) -> list[Finding]:
    return find(b.context(1000 * MIB))


def micro_batches(number: int, kept_of_each: int, *, steps: int = 2) -> TraceBuilder:
    """Steps in whose micro-batches tensors stay until the optimizer's step."""
    b = TraceBuilder()
    b.parameter("weight", 100)
    for step in range(1, steps + 1):
        made: list[int] = []
        for micro_batch in range(1, number + 1):
            b.phase(PhaseKind.FORWARD, step, micro_batch)
            made += [b.new(MILLION, line=KEPT) for _ in range(kept_of_each)]
            b.phase(PhaseKind.BACKWARD, step, micro_batch)
            b.phase(PhaseKind.OTHER, step)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
        b.free(*made)
        b.phase(PhaseKind.OTHER, step)
    return b


def test_what_grows_over_the_micro_batches_of_a_step() -> None:
    (finding,) = found(micro_batches(6, 2))
    assert "grows by 2.00 MiB a backward pass, to 12.00 MiB" in finding.title
    assert ".detach()" in finding.evidence[-1].text


@pytest.mark.parametrize(("fills", "others"), [(True, ""), (False, " and on what else is assigned here")])
def test_a_variable_that_keeps_graphs_from_pass_to_pass_is_named_with_its_place(fills: bool, others: str) -> None:
    b = micro_batches(6, 2)
    b.trace.holders.append(LOSSES._replace(kind="", fills=fills, storages=(1, 2, 3), nodes=20))
    (finding,) = found(b)
    assert finding.evidence[-1].text == f"fix at x/train.py:9: call .detach() on `losses`{others} after each pass"


def test_a_graph_that_later_backwards_go_through_again_was_retained() -> None:
    b = micro_batches(6, 2)
    kept = [index for index, one in enumerate(b.trace.storages) if b.trace.source_line(one) == KEPT]
    b.trace.holders.append(LOSSES._replace(kind="", storages=tuple(kept[:3]), nodes=20))
    last = max(time for time, phase in b.trace.list_phase_begins() if phase.kind is PhaseKind.BACKWARD) + 1
    for used, is_told in ((last, True), (0, False)):
        b.trace.last_uses = [used] * len(b.trace.storages)
        (finding,) = found(b)
        assert ("leave out retain_graph=True" in finding.evidence[-1].text) is is_told


def calls_before_one_backward(number: int, owner: tuple[Role, str] | None = (Role.INPUT, "")) -> TraceBuilder:
    """A run that calls its model `number` times, each for a MiB of `owner`, before a backward that it never reaches."""
    b = TraceBuilder()
    b.parameter("weight", 100)
    b.trace.sources.append("train.py:5 main")
    source = len(b.trace.sources) - 1
    for _ in range(number):
        b.phase(PhaseKind.FORWARD)
        begin = len(b.trace.events)
        b.new(MILLION, owner=owner)
        b.trace.forwards.append(Forward(begin, len(b.trace.events), NONE, source, True, 5, ()))
        b.phase(PhaseKind.OTHER)
    b.trace.last_uses = list(range(len(b.trace.storages)))
    return b


def test_calls_that_wait_for_one_backward_are_told_where_memory_runs_out() -> None:
    (finding,) = find(calls_before_one_backward(80).context(64 * MIB))
    assert finding.is_decisive and "grows by 1.00 MiB a call, to " in finding.title
    assert finding.severity is Severity.WARNING  # 1 MiB a call would be a note, if it were not the cause
    fixes = [one.text for one in finding.evidence if one.text.startswith("fix")]
    assert fixes == ["fix: make fewer calls at train.py:5 before each backward()"]
    assert finding.culprit is not None and finding.culprit.name.startswith("graphs of ")
    assert not find(calls_before_one_backward(80).context(1000 * MIB))
    b = calls_before_one_backward(80)
    b.trace.may_train = False  # no backward is to come: it is an evaluation with gradients
    assert not find(b.context(64 * MIB))


def test_what_a_cause_keeps_stands_beside_the_categories() -> None:
    b = calls_before_one_backward(80)
    b.enter("")
    b.leave()
    b.trace.facts = Facts(device=DeviceFacts("A", 64 * MIB, usable_bytes=64 * MIB))
    peak = analyze(b.trace).peak
    (culprit,) = peak.culprits.items()
    assert culprit == ("graphs of 80 calls", {"inputs": 80 * MIB})
    assert peak.categories["inputs"] >= 80 * MIB


@pytest.mark.parametrize(("first", "is_keeper"), [(4, True), (5, False)])
def test_what_has_tensors_of_most_calls_keeps_them(first: int, is_keeper: bool) -> None:
    """Of the 8 calls before it was found, the last 5 or 4: weights of the inner steps of one task are such a dict."""
    b = calls_before_one_backward(80)
    event = b.trace.forwards[8].begin
    b.trace.holders.append(LOSSES._replace(event=event, storages=tuple(range(first, 9)), nodes=20))
    (finding,) = find(b.context(64 * MIB))
    assert ("kept by list `losses`" in finding.title) == is_keeper


def test_of_calls_at_several_lines_no_line_is_the_one_to_change() -> None:
    """The inner steps of a task, and the call whose loss is summed."""
    b = calls_before_one_backward(80)
    b.trace.sources.append("train.py:9 main")
    b.trace.forwards[-1] = b.trace.forwards[-1]._replace(source=len(b.trace.sources) - 1)
    (finding,) = find(b.context(64 * MIB))
    fix = next(one for one in finding.evidence if one.text.startswith("fix"))
    assert "backward() for each part" in fix.text and fix.source is None


@pytest.mark.parametrize("are_in_vain", [False, True])
def test_the_graphs_of_gradients_that_wait_for_one_backward(are_in_vain: bool) -> None:
    """As of the inner steps of tasks: which of them belong together is not known, nor what the run needs then."""
    b = TraceBuilder()
    b.trace.sources.append("maml.py:7 adapt")
    uses = []
    for _ in range(20):
        b.phase(PhaseKind.FORWARD)
        begin = len(b.trace.events)
        b.new(MILLION, owner=(Role.INPUT, ""))
        b.trace.forwards.append(Forward(begin, len(b.trace.events), NONE, 0, True, 5, ()))
        b.alloc(2 * MIB)
        if are_in_vain:
            b.trace.graph_backwards.append(GraphBackward(begin, len(b.trace.events), 0, NONE))
        uses += [len(b.trace.events)] * 2
        b.phase(PhaseKind.OTHER)
    b.trace.last_uses = uses
    (finding,) = find(b.context(40 * MIB))
    assert any("create_graph=False at maml.py:7" in one.text for one in finding.evidence) is are_in_vain
    assert all(one.required_bytes is None for one in finding.evidence) is are_in_vain


def test_what_micro_batches_keep_with_its_graph_is_to_be_detached() -> None:
    b = micro_batches(6, 1)
    made = [index for index, one in enumerate(b.trace.storages) if b.trace.source_line(one) == KEPT]
    b.trace.holders.append(LOSSES._replace(storages=tuple(made), nodes=20))
    (finding,) = found(b)
    assert finding.edit == Edit(EditKind.KEEP_DETACHED, "/x/train.py:9 main", "losses")
    assert "on what list `losses` keeps after each pass" in finding.evidence[-1].text
    b.trace.holders[0] = b.trace.holders[0]._replace(nodes=0)
    assert found(b)[0].edit == Edit(EditKind.KEEP_ON_HOST, "/x/train.py:9 main", "losses")


def test_calls_that_go_on_with_the_result_of_the_last_are_none() -> None:
    assert not find(calls_before_one_backward(80, owner=None).context(64 * MIB))


def test_two_models_that_take_turns_are_none() -> None:
    assert not found(micro_batches(2, 1))


def test_calls_are_freed_at_their_ends() -> None:
    """What a call has made, and is not over by then, is not."""
    b = calls_before_one_backward(4)
    context = b.context()
    ends = [forward.end for forward in b.trace.forwards[:3]]
    assert memory_growth._find_ends_of_rounds(context, [1, 2, 3, 4], ends) == {
        index: forward.end for index, forward in enumerate(b.trace.forwards[:3], 1)
    }


@pytest.mark.parametrize("is_again", [True, False])
def test_without_the_graphs_that_each_backward_goes_through_each_is_freed_after_its_own(is_again: bool) -> None:
    """Without retain_graph=True: a backward that used these later would not any more. Else after the last use."""
    b = micro_batches(6, 1, steps=1)
    made = [index for index, one in enumerate(b.trace.storages) if b.trace.source_line(one) == KEPT]
    times = [time for time, phase in b.trace.list_phase_begins() if phase.kind is PhaseKind.BACKWARD]
    b.trace.last_uses = [NONE] * len(b.trace.storages)
    for number, index in enumerate(made):
        b.trace.last_uses[index] = times[-1] + 1 if is_again else times[number] + 1
    (finding,) = find(b.context(4 * MIB))
    change = "freed after the backward pass that makes it" if is_again else "freed after its last use"
    assert any(f"{change}, the run allocates at most 1.00 MiB instead of 6.00 MiB" in e.text for e in finding.evidence)
    assert finding.is_decisive


@pytest.mark.parametrize("is_again", [True, False])
def test_a_list_whose_graphs_each_backward_goes_through_is_to_be_emptied(is_again: bool) -> None:
    b = micro_batches(6, 1)
    made = [index for index, one in enumerate(b.trace.storages) if b.trace.source_line(one) == KEPT]
    b.trace.holders.append(LOSSES._replace(storages=tuple(made), nodes=20))
    births, _ = b.trace.lifetimes()
    backward = PhaseKind.BACKWARD
    times = [time for time, phase in b.trace.list_phase_begins() if phase.kind is backward]
    own = {index: next(time for time in times if time > births[index]) for index in made}  # its own backward
    last = {index: times[5 if index <= made[5] else 11] for index in made}  # that of its step
    b.trace.last_uses = [NONE] * len(b.trace.storages)
    for index in made:
        b.trace.last_uses[index] = (last if is_again else own)[index] + 1
    text = found(b)[0].evidence[-1].text
    assert ("empty it after each pass (.clear()), and leave out retain_graph=True" in text) == is_again
    assert ("on what list `losses` keeps after each pass" in text) != is_again
