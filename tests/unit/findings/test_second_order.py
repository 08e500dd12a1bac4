"""Gradients with a graph of their own, many of one line, and no backward that differentiates them."""

from __future__ import annotations

import pytest
import torch

import memprof
from memprof.findings import memory_growth
from memprof.findings.proposals import second_order
from memprof.trace.events import NONE, GraphBackward, PhaseKind, Trace
from memprof.units import MIB
from tests.unit.traces import TraceBuilder


def inner_steps(num_calls: int, *, caller_of_last: int = NONE, plain_before: int | None = None) -> TraceBuilder:
    """Each gradient leaves 10 MiB of its graph, and 1 MiB that is used afterwards: a parameter of the next step."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.trace.sources.append("maml.py:7 adapt")
    uses: dict[int, int] = {}
    for number in range(num_calls):
        if number == plain_before:
            b.phase(PhaseKind.BACKWARD)
            b.phase(PhaseKind.FORWARD)
        begin = len(b.trace.events)
        b.phase(PhaseKind.BACKWARD)
        graph, result = b.alloc(10 * MIB), b.alloc(MIB)
        end = len(b.trace.events)
        caller = caller_of_last if number == num_calls - 1 else NONE
        b.trace.graph_backwards.append(GraphBackward(begin, end, 0, caller))
        b.phase(PhaseKind.FORWARD)
        uses |= {graph: end, result: end + 1}
    b.alloc(MIB)
    b.trace.last_uses = [uses.get(index, NONE) for index in range(len(b.trace.storages))]
    return b


@pytest.mark.parametrize(
    ("builder", "num_told"),
    [
        (inner_steps(3), None),
        (inner_steps(4), 4),
        (inner_steps(5), 5),
        (inner_steps(4, caller_of_last=0), None),  # of a function that two lines call
        (inner_steps(8, plain_before=4), 4),  # the first four are differentiated, or dropped
        (inner_steps(8, plain_before=5), None),
    ],
    ids=["three", "four", "five", "another caller", "a backward between", "three after a backward"],
)
def test_gradients_in_a_loop(builder: TraceBuilder, num_told: int | None) -> None:
    found = list(second_order.propose(builder.context()))
    assert [one.change.startswith("set create_graph=False at maml.py:7 (") for one in found] == [True] * bool(num_told)
    assert all(f"{num_told} gradients" in one.change and one.source == "maml.py:7 adapt" for one in found)


def test_what_is_used_later_stays() -> None:
    b = inner_steps(4)
    (proposal,) = second_order.propose(b.context())
    freed = [event.ref for event in proposal.trace.events if event.kind.name == "FREE"]
    assert freed == [0, 2, 4, 6]  # the graphs, and not what the next step begins with


def record(create_graph: bool) -> Trace:
    with memprof.virtual_gpu("h100-80gb") as gpu:
        x = torch.ones(4, device="cuda", requires_grad=True)

        def slope(y: torch.Tensor) -> torch.Tensor:
            return torch.autograd.grad(y, x, create_graph=create_graph)[0]

        slope((x**3).sum())
        torch.func.grad(lambda z: (z**3).sum())(x.detach())
    return gpu.trace


def test_the_lines_are_recorded() -> None:
    """Not those of torch.func.grad, which asks for a graph by itself."""
    (call,) = [call for call in record(True).graph_backwards if call.source != NONE]
    trace = record(True)
    assert [trace.source_at(index).rpartition(" ")[2] for index in (call.source, call.caller)] == ["slope", "record"]  # type: ignore[union-attr]
    assert not [call for call in record(False).graph_backwards if call.source != NONE]


@pytest.mark.parametrize(("other_mib", "is_told"), [(31, True), (32, False)])
def test_weights_of_inner_steps_that_pile_up_need_no_graph(other_mib: int, is_told: bool) -> None:
    """Most of what piles up is kept by the graphs of the gradients: 32 MiB of each step, beside so many others."""
    b = TraceBuilder()
    b.trace.sources.append("maml.py:7 adapt")
    uses = {}
    for step in range(1, 7):
        b.phase(PhaseKind.FORWARD, step)
        begin = len(b.trace.events)
        b.phase(PhaseKind.BACKWARD, step)
        graph, other = b.alloc(32 * MIB, op="aten.mul"), b.alloc(other_mib * MIB, line="maml.py:9 main")
        end = len(b.trace.events)
        b.trace.graph_backwards.append(GraphBackward(begin, end, 0, NONE))
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
        uses |= {graph: end, other: end + 1}
    b.trace.last_uses = [uses[index] for index in range(len(b.trace.storages))]
    fixes = [one.text for finding in memory_growth.find(b.context()) for one in finding.evidence if "fix" in one.text]
    assert (
        any("create_graph=False at maml.py:7" in text and "detach what is carried" in text for text in fixes) == is_told
    )
