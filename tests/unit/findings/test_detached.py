"""A critic that is given a generator's images with their graph, where memory runs out in its first step, by hand."""

from __future__ import annotations

import pytest

from memprof.findings.proposals import detached
from memprof.findings.suggestions import Proposal
from memprof.ledger.what_if import compute_allocated_peak
from memprof.trace.events import FirstStep, Forward, Module, ModuleRole, PhaseKind
from memprof.units import MIB
from tests.unit.traces import TraceBuilder


def propose(
    *, real: bool = True, optimizers: int = 2, given: bool = True, stepped: bool = False, nodes: int = 9
) -> list[Proposal]:
    """The critic is called for real images, the generator makes others, and the critic's second call fails."""
    b = TraceBuilder()
    trace = b.trace
    trace.modules += [Module("", name, ModuleRole.ROOT, "") for name in ("Generator", "Critic")]
    weights = [b.parameter(name, MIB // 4) for name in ("generator", "critic")]
    trace.first_steps = [FirstStep((index,), (-1,), (2,)) for index in weights][:optimizers]
    if stepped:
        b.phase(PhaseKind.OPTIMIZER_STEP)
    b.phase(PhaseKind.FORWARD)
    line = TraceBuilder._index(trace.sources, "gan.py:9 train")
    uses = dict.fromkeys(range(100), -1)
    if real:
        begin = len(trace.events)
        b.alloc(5 * MIB)
        trace.forwards.append(Forward(begin, len(trace.events), 1, line, True, 9, ()))
    begin = len(trace.events)
    b.alloc(40 * MIB)
    images = b.alloc(2 * MIB)
    uses[weights[0]] = len(trace.events)
    trace.forwards.append(Forward(begin, len(trace.events), 0, line, True, nodes, (images,)))
    begin = len(trace.events)
    b.alloc(5 * MIB)
    uses[weights[1]] = len(trace.events)
    uses[images] = len(trace.events) if given else begin - 1
    trace.failed_forward = Forward(begin, len(trace.events), 1, line, True, 9, ())
    trace.ended_out_of_memory = True
    trace.last_uses = [uses[index] for index in range(len(trace.storages))]
    return list(detached.propose(b.context()))


def test_the_graph_of_the_generator_is_freed() -> None:
    (proposal,) = propose()
    assert proposal.change == (
        "call .detach() on what `Generator` returns, for the call at gan.py:9: training `Critic` needs no graph of it"
    )
    assert proposal.source == "gan.py:9 train"
    assert compute_allocated_peak(proposal.trace) == (2 + 5 + 42) * MIB  # while the generator runs


@pytest.mark.parametrize(
    "change",
    [{"real": False}, {"optimizers": 1}, {"given": False}, {"stepped": True}, {"nodes": 0}],
    ids=["generator's loss", "one optimizer", "other images", "later step", "under no_grad"],
)
def test_else_nothing_is_said(change: dict[str, bool | int]) -> None:
    assert not propose(**change)  # type: ignore[arg-type]
