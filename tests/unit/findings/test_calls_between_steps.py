"""Calls without gradients of a model that is trained, in training mode: rendering, sampling; and masks of tokens."""

from __future__ import annotations

import pytest

from memprof.findings.proposals import micro_batch
from memprof.trace.events import NONE, Forward, PhaseKind, Role
from tests.unit.traces import TraceBuilder


def call(b: TraceBuilder, module: str, nodes: int) -> None:
    begin = len(b.trace.events)
    b.enter(module, module)
    made = b.new(64, 1000)
    b.leave()
    index = [one.path for one in b.trace.modules].index(module)
    b.trace.forwards.append(Forward(begin, len(b.trace.events), index, NONE, training=True, nodes=nodes, outputs=()))
    if nodes:
        b.free(made)


def rendered(*, module: str = "net", nodes: int = 0, before: int = 0, steps: bool = True) -> TraceBuilder:
    """A step of `net`, perhaps another call with gradients, and a call whose result is the peak."""
    b = TraceBuilder()
    b.new(64, 8, owner=(Role.INPUT, ""))
    b.phase(PhaseKind.FORWARD)
    call(b, "net", 5)
    b.phase(PhaseKind.BACKWARD)
    b.phase(PhaseKind.OPTIMIZER_STEP if steps else PhaseKind.OTHER)
    b.phase(PhaseKind.FORWARD, 2)
    for _ in range(before):
        call(b, "net", 5)
    call(b, module, nodes)
    b.enter(module, module)
    return b


@pytest.mark.parametrize(
    ("builder", "is_between"),
    [
        (rendered(), True),
        (rendered(module="teacher"), False),
        (rendered(nodes=5), False),
        (rendered(before=1), False),  # of the same step
        (rendered(steps=False), False),
    ],
)
def test_their_batches_add_up_no_gradients(builder: TraceBuilder, is_between: bool) -> None:
    context = builder.context()
    (proposal,) = (*micro_batch.propose_batches(context), *micro_batch.propose_accumulation(context))
    assert ("one after another" in proposal.change) == is_between and (proposal.value is None) == is_between


def test_a_mask_of_tokens_is_no_batch() -> None:
    for length, is_batch in ((1000, False), (999, True)):
        b = TraceBuilder(PhaseKind.FORWARD)
        b.new(1, 1000, 8, owner=(Role.INPUT, ""))
        b.new(length, length, owner=(Role.INPUT, ""))
        assert (micro_batch.find_batch_size(b.context()) is not None) == is_batch
