"""What may be computed again, in chunks or for fewer steps: checkpointing, losses, torch.func.grad, LBFGS."""

from __future__ import annotations

import pytest

from memprof.findings import Context
from memprof.findings.proposals import checkpointing, chunked_loss, gradients, history
from memprof.ledger.what_if import compute_allocated_peak
from memprof.spec import TargetSpec
from memprof.trace.events import NONE, Caller, Event, EventKind, PhaseKind, Role, VmapCall
from memprof.units import GIB, MIB
from tests.unit.findings.proposals.proposed import layers, listed, only
from tests.unit.traces import TraceBuilder

ALLOC, FREE = EventKind.ALLOC, EventKind.FREE


@pytest.mark.parametrize("num_pairs", [10, 12])
def test_a_history_of_more_than_ten_pairs_may_be_shorter(num_pairs: int) -> None:
    b = TraceBuilder()
    b.phase(PhaseKind.OPTIMIZER_STEP)
    for _ in range(num_pairs):
        for name in ("old_dirs", "old_stps"):
            b.new(MIB, owner=(Role.OPTIMIZER_STATE, name), line="train.py:8 main")
    if num_pairs == 10:
        assert not list(history.propose(b.context()))
        return
    change = only(history.propose(b.context()))
    assert change.change.startswith("set history_size=10 in torch.optim.LBFGS, which steps at train.py:8")
    # A vector lives until the one ten later is there: ten of each list, and one more.
    assert compute_allocated_peak(change.trace) == 21 * 4 * MIB


def losses(width: int, *, tokens: bool) -> Context:
    """A cross-entropy over `width` classes, in a model with a table of as many words or without."""
    b = TraceBuilder()
    b.parameter("embed.weight" if tokens else "head.weight", width, 512)
    if tokens:
        b.inputs(1, 8192)
    else:
        b.phase(PhaseKind.FORWARD)
    b.new(8192, width, op="aten._log_softmax")
    b.phase(PhaseKind.BACKWARD)
    b.new(8192, width, op="aten._log_softmax_backward_data")
    return b.context(spec=TargetSpec(model="x")) if tokens else b.context()


def test_a_loss_over_words_is_chunked_and_one_over_classes_is_not() -> None:
    changed = only(chunked_loss.propose(losses(50304, tokens=True))).trace
    # The two copies of 1.54 GiB are one chunk together.
    assert sum(storage.num_bytes for storage in changed.storages[2:]) == pytest.approx(GIB, rel=0.001)
    assert not list(chunked_loss.propose(losses(50304, tokens=False)))


@pytest.mark.parametrize(("num_tokens", "is_told"), [(8192, True), (4096, False)])
def test_one_word_of_each_token_needs_no_log_probabilities_of_all(num_tokens: int, is_told: bool) -> None:
    b = TraceBuilder()
    b.parameter("embed.weight", 50304, 512)
    b.inputs(1, 8192)
    b.new(8192, 50304, op="aten._log_softmax")
    b.new(num_tokens, op="aten.gather", line="loss.py:4 score")
    b.phase(PhaseKind.BACKWARD)
    (proposal,) = chunked_loss.propose(b.context())
    change = proposal.change
    assert ("logsumexp" in change) == ("loss.py:4" in change) == is_told


@pytest.mark.parametrize(
    ("op", "is_trained", "is_told"),
    [("_log_softmax", False, True), ("_log_softmax", True, False), ("_softmax", False, False)],
)
def test_scores_of_tokens_are_computed_in_chunks_where_nothing_is_trained(
    op: str, is_trained: bool, is_told: bool
) -> None:
    b = TraceBuilder()
    b.parameter("embed.weight", 50304, 512)
    b.inputs(1, 8192)
    b.new(8192, 50304, op=f"aten.{op}", line="score.py:4 main")
    if is_trained:
        b.phase(PhaseKind.BACKWARD)
    proposals = list(chunked_loss.propose_scores(b.context()))
    assert len(proposals) == is_told
    for proposal in proposals:
        assert "minus logsumexp instead of log_softmax at score.py:4" in proposal.change
        assert proposal.trace.storages[-1].num_bytes == pytest.approx(GIB, rel=0.001)


def test_layers_run_again_when_their_backward_begins() -> None:
    b = layers(backward=True)
    events = only(checkpointing.propose(b.context())).trace.events
    refs = [(event.kind, event.ref) for event in events if event.kind in (ALLOC, FREE)]
    assert refs == [
        (ALLOC, 0), (FREE, 0), (ALLOC, 1), (ALLOC, 2), (FREE, 1),
        (ALLOC, 3), (FREE, 3), (ALLOC, 4), (ALLOC, 5), (FREE, 4),
        (ALLOC, 3), (FREE, 3), (ALLOC, 4), (ALLOC, 6), (FREE, 4), (FREE, 5),
        (ALLOC, 0), (FREE, 0), (ALLOC, 1), (ALLOC, 7), (FREE, 1), (FREE, 2),
    ]  # fmt: skip


def test_of_a_run_that_ended_before_its_backward_what_layers_left_is_freed() -> None:
    events = only(checkpointing.propose(layers(backward=False).context())).trace.events
    assert [event.ref for event in events if event.kind is FREE] == [0, 1, 3, 4]
    b = TraceBuilder(PhaseKind.FORWARD)
    b.alloc(4 * MIB)
    assert not list(checkpointing.propose(b.context()))  # there are no layers


@pytest.mark.parametrize(
    ("by", "phase", "is_freed", "in_vmap", "is_told"),
    [
        ("torch.func.grad", PhaseKind.BACKWARD, False, False, True),
        ("torch.func.grad_and_value", PhaseKind.BACKWARD, False, False, True),
        ("torch.func.vmap", PhaseKind.BACKWARD, False, False, False),
        ("torch.func.grad", PhaseKind.FORWARD, False, False, False),
        ("torch.func.grad", PhaseKind.BACKWARD, True, False, False),
        ("torch.func.grad", PhaseKind.BACKWARD, False, True, False),
    ],
)
def test_what_torch_func_grad_keeps_may_be_freed_as_it_is_used(
    by: str, phase: PhaseKind, is_freed: bool, in_vmap: bool, is_told: bool
) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    begin = len(b.trace.events)
    saved = b.alloc(100 * MIB)
    end = len(b.trace.events)
    if in_vmap:
        b.trace.vmaps.append(VmapCall(begin, end, 4, "vmap", 0))
    b.trace.sources.append("train.py:7 main")
    b.trace.callers = [Caller(saved, 1, by)]
    b.phase(phase)
    b.alloc(MIB)
    used = len(b.trace.events)
    if is_freed:
        b.free(saved)
    b.alloc(200 * MIB)
    b.trace.last_uses = [used, NONE, NONE]
    found = listed(gradients.propose(b.context()))
    assert [one.change for one in found] == [
        f"use torch.autograd.grad instead of {by} at train.py:7, unless it is differentiated again"
    ] * is_told
    for one in found:
        assert one.trace.events[used] == Event(FREE, saved)
    b.trace.last_uses = []
    assert not list(gradients.propose(b.context()))


@pytest.mark.parametrize(("op", "is_told"), [("aten.scatter", True), ("aten.zeros_like", True), ("aten.add", False)])
def test_smoothed_targets_as_large_as_the_logits_are_not_needed(op: str, is_told: bool) -> None:
    b = TraceBuilder()
    b.parameter("embed.weight", 50304, 512)
    b.inputs(1, 8192)
    b.new(8192, 50304, op="aten.addmm", line="model.py:8 forward")
    b.new(8192, 50304, op=op, line="loss.py:4 smooth")
    b.new(8192, 50304, op="aten._log_softmax", line="loss.py:5 smooth")
    b.new(8192, 50304, op="aten.mul", line="loss.py:6 smooth")
    b.phase(PhaseKind.BACKWARD)
    (proposal,) = chunked_loss.propose(b.context())
    assert ("label_smoothing" in proposal.change) == is_told
    assert proposal.source == ("loss.py:4 smooth" if is_told else "loss.py:5 smooth")  # else of the log_softmax
