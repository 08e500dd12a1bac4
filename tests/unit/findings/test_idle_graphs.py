"""Graphs of calls that no backward has used, in hand-written traces; weights that wait for theirs."""

from __future__ import annotations

import pytest

from memprof.findings import find_all
from memprof.findings.edits import Edit, EditKind
from memprof.findings.idle_storages import awaits_backward, find_retained_graph
from memprof.trace.events import NONE, Caller, Event, EventKind, Forward, GraphBackward, PhaseKind
from memprof.units import MIB
from tests.unit.findings.idle import OUT, UsesBuilder


@pytest.mark.parametrize("held", [True, False])
def test_what_autograd_saved_may_be_read_where_no_operator_shows_it(held: bool) -> None:
    """Only what a variable holds beyond its last use is idle in the backward."""
    b = UsesBuilder(PhaseKind.FORWARD)
    out = b.alloc(100 * MIB)
    b.use(out)
    b.phase(PhaseKind.BACKWARD)
    b.free(b.alloc(300 * MIB))
    b.free(out)
    if held:
        b.trace.idle_holders.append(OUT._replace(storages=(out,)))
    assert bool(b.find()) == held


def graphs_kept(*, training: bool, uses_backward: bool = False) -> UsesBuilder:
    """Two calls of a net with gradients, each of which keeps 100 MiB; memory has its peak later."""
    b = UsesBuilder(PhaseKind.MODEL)
    for step in range(1, 3):
        b.phase(PhaseKind.FORWARD, step)
        begin = len(b.trace.events)
        b.enter("", "Net")
        saved = b.alloc(100 * MIB)
        b.use(saved)
        b.leave()
        source = b.trace.storages[saved].source
        b.trace.forwards.append(Forward(begin, len(b.trace.events), 0, source, training, 5, ()))
        if uses_backward:
            b.phase(PhaseKind.BACKWARD, step)
            b.use(saved)
    b.phase(PhaseKind.FORWARD, 3)
    b.free(b.alloc(300 * MIB))
    b.phase(PhaseKind.OTHER, 3)
    return b


def test_graphs_that_no_backward_uses_are_told_by_the_call() -> None:
    (finding,) = graphs_kept(training=True).find()
    assert "last use: the graph of 2 calls of Net at train.py:1, which no backward has used" in finding.title
    assert "torch.no_grad()" in finding.evidence[0].text and finding.evidence[0].source == "train.py:1 main"
    (other,) = graphs_kept(training=True, uses_backward=True).find()
    assert "the result of empty at train.py:1" in other.title


def test_a_backward_that_came_before_the_last_use_has_used_the_graph() -> None:
    """Statistics of a layer's input are computed after the backward."""
    b = graphs_kept(training=True, uses_backward=True)
    for saved in range(2):
        b.use(saved)  # in the last phase
    b.phase(PhaseKind.FORWARD, 4)
    b.free(b.alloc(400 * MIB))
    (finding,) = b.find()
    assert "no backward has used" not in finding.title


def test_calls_are_counted_that_keep_something_at_a_time() -> None:
    b = graphs_kept(training=True)
    b.trace.events[-2:-2] = [Event(EventKind.FREE, 0), Event(EventKind.FREE, 1)]
    for call in range(2, 4):
        begin = len(b.trace.events)
        b.phase(PhaseKind.FORWARD, 2 + call)
        b.enter("", "Net")
        b.use(b.alloc(100 * MIB))
        b.leave()
        b.trace.forwards.append(Forward(begin, len(b.trace.events), 0, b.trace.storages[0].source, True, 5, ()))
    b.phase(PhaseKind.FORWARD, 7)
    b.free(b.alloc(300 * MIB))
    b.phase(PhaseKind.OTHER, 7)
    (finding,) = b.find()
    assert "the graph of 2 calls of Net" in finding.title  # of four


def test_what_an_evaluation_keeps_for_a_backward_is_told_once() -> None:
    b = graphs_kept(training=False)
    assert not b.find()
    assert [finding.id for finding in find_all(b.context())] == ["evaluation-with-gradients"]


def waiting(
    nodes: int = 5,
    *,
    ended: bool = True,
    then: PhaseKind | None = None,
    in_call: bool = True,
    phase: PhaseKind = PhaseKind.FORWARD,
) -> bool:
    """A parameter is used in a forward, in its call or after it, and perhaps another phase begins."""
    b = UsesBuilder(PhaseKind.MODEL)
    weight = b.parameter("weight", 100)
    b.phase(phase)
    b.enter("", "Net")
    begin = len(b.trace.events)
    b.alloc(MIB)
    if in_call:
        b.use(weight)
    b.alloc(MIB)
    b.leave()
    b.trace.forwards.append(Forward(begin, len(b.trace.events), 0, 0, True, nodes, ()))
    b.alloc(MIB)
    b.alloc(MIB)
    if not in_call:
        b.use(weight)
    if then is not None:
        b.phase(then)
        b.alloc(MIB)
    b.trace.ended_out_of_memory = ended
    return awaits_backward(b.context(), weight)


def test_the_weights_of_a_call_with_a_graph_wait_for_its_backward() -> None:
    assert waiting()
    assert waiting(1) and not waiting(0)
    assert waiting(0, in_call=False)  # by a function that is no module, with a graph of its own
    assert not waiting(ended=False)  # then the run shows it
    assert not waiting(phase=PhaseKind.EVALUATION)
    assert waiting(then=PhaseKind.OTHER)


@pytest.mark.parametrize("then", [PhaseKind.BACKWARD, PhaseKind.OPTIMIZER_STEP, PhaseKind.EVALUATION])
def test_after_a_backward_no_graph_of_the_forward_is_waited_for(then: PhaseKind) -> None:
    assert not waiting(then=then)


@pytest.mark.parametrize(("at", "is_of_call"), [("begin", True), ("end", False)])
def test_a_call_makes_what_is_allocated_from_its_begin_until_before_its_end(at: str, is_of_call: bool) -> None:
    b = UsesBuilder(PhaseKind.FORWARD)
    b.enter("", "Net")
    kept = b.alloc(100 * MIB)
    b.use(kept)
    b.leave()
    birth = 2
    begin, end = {"begin": (birth, birth + 1), "end": (0, birth)}[at]
    b.trace.forwards.append(Forward(begin, end, 0, 0, True, 5, ()))
    b.phase(PhaseKind.FORWARD, 3)
    b.free(b.alloc(300 * MIB))
    b.phase(PhaseKind.OTHER, 3)
    (finding,) = b.find()
    assert ("1 call of Net at train.py:1" in finding.title) == is_of_call
    assert finding.edit == (Edit(EditKind.NO_GRADIENTS, "train.py:1 main") if is_of_call else None)


def retained(num_freed: int = 0, **changes: bool) -> UsesBuilder:
    """A step whose backward uses six tensors of 50 MiB and frees so many of them; memory runs out in the next forward.

    Changes: no optimizer's step, another backward that it runs out in, a variable that holds all, gradients with a
    graph of their own.
    """
    b = UsesBuilder(PhaseKind.FORWARD)
    saved = [b.alloc(50 * MIB) for _ in range(6)]
    b.phase(PhaseKind.BACKWARD, 1)
    b.trace.callers.append(Caller(b.alloc(MIB), b._index(b.trace.sources, "train.py:8 main"), ""))
    b.use(*saved)
    b.free(*saved[:num_freed])
    b.phase(PhaseKind.OTHER if changes.get("no_step") else PhaseKind.OPTIMIZER_STEP, 1)
    b.phase(PhaseKind.BACKWARD if changes.get("in_backward") else PhaseKind.FORWARD, 2)
    b.alloc(200 * MIB)
    b.use()
    b.trace.ended_out_of_memory = True
    b.trace.idle_holders += [OUT._replace(storages=tuple(saved))] * changes.get("held", False)
    b.trace.graph_backwards += [GraphBackward(0, 1, 0, NONE)] * changes.get("has_graph", False)
    return b


@pytest.mark.parametrize(
    ("num_freed", "changes", "num_retained"),
    [
        (0, {}, 6),
        (3, {}, 3),
        (4, {}, None),  # most are freed: the others have another reason
        (0, {"no_step": True}, None),  # losses of several tasks, one after another
        (0, {"in_backward": True}, None),
        (0, {"held": True}, None),
        (0, {"has_graph": True}, None),
    ],
)
def test_a_graph_that_a_backward_has_retained(
    num_freed: int, changes: dict[str, bool], num_retained: int | None
) -> None:
    found = find_retained_graph(retained(num_freed, **changes).context((500 - 50 * num_freed) * MIB))
    assert (None if found is None else len(found.storages)) == num_retained
    assert found is None or found.source == "train.py:8 main"


def test_without_retain_graph_the_graph_is_freed_as_it_is_used() -> None:
    (finding,) = [one for one in retained().find(400 * MIB) if "retain_graph=True" in one.title]
    assert finding.title == (
        "300.00 MiB stay on the GPU after their last use: the graph of the backward() at train.py:8, kept by "
        "retain_graph=True"
    )
    assert finding.is_decisive and finding.evidence[0].text.startswith("fix: leave out retain_graph=True")
    assert finding.culprit is not None and finding.culprit.name == "a retained graph"
