"""Truncated backpropagation through time, of hand-written traces: each call of a cell keeps 1 MiB for the backward."""

from __future__ import annotations

import pytest

from memprof.findings.proposals import recurrence
from memprof.findings.suggestions import Proposal
from memprof.ledger.what_if import compute_allocated_peak
from memprof.trace.events import Forward, PhaseKind
from memprof.units import MIB
from tests.unit.traces import TraceBuilder


def propose(
    num_calls: int, *, nodes: int = 1, cell: str = "LSTMCell", others: int = 0, backward: bool = True
) -> list[Proposal]:
    """One call of a net, with so many calls of `cell`, and before them `others` of another cell; the last is output."""
    b = TraceBuilder(PhaseKind.FORWARD)
    begin = len(b.trace.events)
    b.enter("", "Net")
    made = []
    for path, name, number in (("other", "GRUCell", others), ("cell", cell, num_calls)):
        for _ in range(number):
            b.enter(path, name)
            made.append(b.alloc(MIB, line=f"{path}.py:5 forward"))
            b.leave()
    b.leave()
    b.trace.forwards.append(Forward(begin, len(b.trace.events), 0, 0, True, nodes, (made[-1],)))
    if backward:
        b.phase(PhaseKind.BACKWARD)
        b.alloc(MIB)
        b.free(*made)
    return list(recurrence.propose(b.context()))


@pytest.mark.parametrize(("num_calls", "size", "mib"), [(64, 8, 8), (65, 9, 9), (72, 9, 9), (73, 10, 10)])
def test_what_an_eighth_of_the_calls_keeps_is_freed_when_the_next_begins(num_calls: int, size: int, mib: int) -> None:
    (proposal,) = propose(num_calls)
    assert f"parts of {size} of the {num_calls} calls of `cell` at cell.py:5" in proposal.change
    assert compute_allocated_peak(proposal.trace) == mib * MIB
    assert proposal.source == "cell.py:5 forward"


@pytest.mark.parametrize(
    "change", [{"num_calls": 63}, {"nodes": 0}, {"cell": "Block"}], ids=["fewer", "without a graph", "no cell"]
)
def test_layers_that_share_weights_are_no_sequence(change: dict[str, object]) -> None:
    assert not propose(**({"num_calls": 64} | change))


@pytest.mark.parametrize(("others", "path"), [(63, "cell"), (65, "other")])
def test_the_cell_that_is_called_most_often_is_named(others: int, path: str) -> None:
    (proposal,) = propose(64, others=others)
    assert f" calls of `{path}` at {path}.py:5" in proposal.change


def test_memory_may_run_out_in_the_call() -> None:
    """What the last window keeps is freed where the trace has ended: there is nothing to insert."""
    (proposal,) = propose(64, backward=False)
    freed = [event.ref for event in proposal.trace.events if event.kind.name == "FREE"]
    assert freed == list(range(56))
