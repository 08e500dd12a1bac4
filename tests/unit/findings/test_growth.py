"""What piles up from step to step in hand-written traces, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memprof.findings import Finding, Severity
from memprof.findings.growth import exhaustion_evidence, is_growing
from memprof.findings.memory_growth import find
from memprof.trace.events import NONE, Forward, Holder, PhaseKind, Role
from memprof.units import MIB
from tests.unit.traces import TraceBuilder

MILLION = MIB // 4  # Elements of float32 in a MiB.
KEPT = "train.py:7 main"
LOSSES = Holder(0, "list", "losses", "/x/train.py:9 main", True, None, (), 0, 0, None)


def steps(b: TraceBuilder, number: int, each: Callable[[int], None]) -> None:
    """Training steps, in each of which `each` is called after the forward's own tensors were made."""
    for step in range(1, number + 1):
        b.phase(PhaseKind.FORWARD, step)
        activation = b.new(MILLION)
        each(step)
        b.phase(PhaseKind.BACKWARD, step)
        b.free(activation)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
        b.phase(PhaseKind.OTHER, step)


def found(b: TraceBuilder) -> list[Finding]:
    return find(b.context(1000 * MIB))


def kept(number: int = 4, holder: Holder | None = None, elements: int = MILLION) -> TraceBuilder:
    """A run in which each step leaves a tensor behind."""
    b = TraceBuilder()
    b.parameter("weight", 100)
    made: list[int] = []
    steps(b, number, lambda step: made.append(b.new(elements, line=KEPT)))
    if holder is not None:
        b.trace.holders.append(holder._replace(storages=tuple(made[:2])))
    return b


def test_what_each_step_leaves_behind() -> None:
    (finding,) = found(kept(4, LOSSES))
    assert finding.severity is Severity.WARNING and finding.id == "memory-growth"
    assert "grows by 1.00 MiB a step in 4 steps" in finding.title
    assert "kept by list `losses` (x/train.py:9)" in finding.title
    assert finding.num_bytes == 3 * MIB  # at the end of step 4, of the tensors of the three before it
    keeper, tensor, lasts, fix = finding.evidence
    assert keeper.source == fix.source == LOSSES.source and "filled at x/train.py:9" in keeper.text
    assert tensor.source == KEPT and tensor.num_bytes == MIB and "4 tensors live at the last" in tensor.text
    assert "memory runs out at about step " in lasts.text and ".cpu()" in fix.text


def test_a_list_that_is_seen_with_one_kind_and_later_with_another_is_one() -> None:
    b = TraceBuilder()
    b.parameter("weight", 100)
    outputs: list[int] = []
    batches: list[int] = []

    def each(step: int) -> None:
        outputs.append(b.new(MILLION, line=KEPT))
        batches.append(b.new(2 * MILLION, line="train.py:8 main"))

    steps(b, 4, each)
    b.trace.holders += [
        LOSSES._replace(storages=tuple(batches[:3])),
        LOSSES._replace(storages=tuple(outputs[:2]), nodes=20, node_steps=2),
    ]
    (finding,) = found(b)
    texts = [line.text for line in finding.evidence]
    assert "grows by 3.00 MiB a step" in finding.title
    assert any("20 nodes from 2 steps" in text and "backward has freed what it saved" in text for text in texts)


def test_what_has_a_reset_is_to_be_reset() -> None:
    (finding,) = found(kept(4, LOSSES._replace(has_reset=True)))
    assert finding.evidence[-1].text.startswith("fix at x/train.py:9: call reset() at the end of each epoch, or keep")


def test_nobody_was_seen_to_keep_it() -> None:
    (finding,) = found(kept(4))
    assert "kept by" not in finding.title and "was not seen" in finding.evidence[0].text


def test_two_steps_show_nothing() -> None:
    assert not found(kept(2, LOSSES)) and found(kept(3, LOSSES))


def test_a_little_without_a_graph_is_let_pass() -> None:
    assert not found(kept(4, LOSSES, elements=1))


def test_losses_with_their_graph_are_told_of_however_small() -> None:
    (finding,) = found(kept(4, LOSSES._replace(nodes=20, node_steps=2), elements=1))
    assert finding.severity is Severity.NOTE
    texts = [line.text for line in finding.evidence]
    assert any("20 nodes from 2 steps" in text and "backward has freed what it saved" in text for text in texts)
    assert texts[-1].startswith("fix at x/train.py:9: keep the number (.item())")


def test_what_the_graph_keeps_is_the_same_finding() -> None:
    b = TraceBuilder()
    b.parameter("weight", 100)
    losses: list[int] = []

    def each(step: int) -> None:
        b.new(3 * MILLION, op="aten.gelu", line="model.py:3 forward")
        losses.append(b.new(1, line=KEPT))

    steps(b, 4, each)
    b.trace.holders.append(LOSSES._replace(storages=tuple(losses), nodes=20, node_steps=4))
    (finding,) = found(b)
    assert finding.num_bytes == 3 * (3 * MIB + 512)
    assert any("what it saved for a backward is live with it: 3.00 MiB a step" in e.text for e in finding.evidence)


def test_a_running_sum_keeps_graphs_and_nothing_on_the_gpu() -> None:
    b = TraceBuilder()
    b.parameter("weight", 100)
    steps(b, 3, lambda step: None)
    b.trace.holders.append(LOSSES._replace(kind="", name="total", nodes=60, node_steps=3))
    (finding,) = found(b)
    assert finding.num_bytes is None and finding.severity is Severity.NOTE
    assert "variable `total`" in finding.title and "nothing on the GPU" in finding.title


def test_joined_tensors() -> None:
    b = TraceBuilder()
    b.parameter("weight", 100)
    everything: list[int] = []

    def join(step: int) -> None:
        everything.append(b.new(step * MILLION, op="aten.cat", line=KEPT))
        b.free(*everything[-2:-1])

    steps(b, 5, join)
    (finding,) = found(b)
    assert finding.num_bytes == 4 * MIB


def cleared(each: int, *, then: int, holder: Holder = LOSSES) -> TraceBuilder:
    """A run whose steps fill a list that is cleared after `each` steps, and `then` steps more."""
    b = TraceBuilder()
    b.parameter("weight", 100)
    made: list[int] = []

    def fill(step: int) -> None:
        if len(made) == each:
            b.free(*made)
            made.clear()
        made.append(b.new(MILLION, line=KEPT))

    steps(b, each + then, fill)
    b.trace.holders.append(holder._replace(storages=(2, 4)))
    return b


def test_what_is_cleared_after_the_peak() -> None:
    (finding,) = found(cleared(6, then=2))
    assert finding.severity is Severity.WARNING and finding.num_bytes == 6 * MIB
    assert "grows by 1.00 MiB a step over 6 steps, to 6.00 MiB at the peak, kept by list `losses`" in finding.title
    assert finding.evidence[-1].text.startswith("fix at x/train.py:9: keep what is needed")


def micro_batches(number: int, kept_of_each: int) -> TraceBuilder:
    """Two steps, in whose micro-batches tensors stay until the optimizer's step."""
    b = TraceBuilder()
    b.parameter("weight", 100)
    for step in (1, 2):
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
    assert "grows by 2.00 MiB a backward pass over 6 backward passes, to 12.00 MiB at the peak" in finding.title
    assert ".detach()" in finding.evidence[-1].text


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
    assert finding.is_decisive and "grows by 1.00 MiB a call over " in finding.title
    assert finding.severity is Severity.WARNING  # 1 MiB a call would be a note, if it were not the cause
    assert finding.evidence[-1].text.startswith("fix: call backward() after each call at train.py:5")
    assert not find(calls_before_one_backward(80).context(1000 * MIB))


class TestSilentOn:
    @pytest.mark.parametrize("each", [2, 3])
    def test_what_is_cleared_soon(self, each: int) -> None:
        assert not found(cleared(each, then=2))

    def test_calls_that_go_on_with_the_result_of_the_last(self) -> None:
        assert not find(calls_before_one_backward(80, owner=None).context(64 * MIB))

    def test_two_models_that_take_turns(self) -> None:
        assert not found(micro_batches(2, 1))

    def test_a_window(self) -> None:
        b = TraceBuilder()
        b.parameter("weight", 100)
        window: list[int] = []

        def slide(step: int) -> None:
            window.append(b.new(MILLION, line=KEPT))
            if len(window) > 3:
                b.free(window.pop(0))

        steps(b, 7, slide)
        assert not found(b)

    def test_a_bounded_container_that_is_not_full_yet(self) -> None:
        assert not found(kept(4, LOSSES._replace(kind="deque", limit=100)))

    @pytest.mark.parametrize("role", [Role.GRADIENT, Role.OPTIMIZER_STATE, Role.BUFFER])
    def test_what_has_a_role(self, role: Role) -> None:
        b = TraceBuilder()
        b.parameter("weight", 100)
        steps(b, 6, lambda step: b.new(MILLION, owner=(role, f"expert.{step}")) and None)
        assert not found(b)

    def test_what_is_made_late_and_once(self) -> None:
        b = TraceBuilder()
        b.parameter("weight", 100)
        steps(b, 6, lambda step: b.new(MILLION, line=KEPT) and None if step == 3 else None)
        assert not found(b)

    def test_batches_that_get_longer(self) -> None:
        b = TraceBuilder()
        b.parameter("weight", 100)
        before: list[int] = []

        def batch(step: int) -> None:
            before.append(b.new(MILLION + step * 1000, op="aten.cat", line=KEPT))
            b.free(*before[-2:-1])

        steps(b, 6, batch)
        assert not found(b)


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ([0, 1, 2], True),
        ([0, 1, 1], False),  # one tensor waits for its successor
        ([0, 1, 2, 2], False),  # a window of three
        ([0, 1, 2, 1, 2], False),  # it is emptied
        ([5, 5, 5], False),
        ([0, 0, 1, 1, 2, 2, 3, 3], True),  # every second round
        ([0, 0, 1, 1, 2, 2, 2, 2], False),
    ],
)
def test_curves(curve: list[int], expected: bool) -> None:
    assert is_growing(curve) is expected


@pytest.mark.parametrize(
    ("spare_bytes", "per_round", "lasts"),
    [
        (2 * MIB, MIB, "2"),
        (2 * MIB - 1, MIB, "1"),
        (MIB - 1, MIB, None),
        (0, MIB, None),
        (2 * MIB, 0, None),
        (10_000_000, 1, "10,000,000"),
        (10_000_001, 1, None),
    ],
)
def test_rounds_until_the_gpu_is_full_count_from_what_is_reserved(
    spare_bytes: int, per_round: int, lasts: str | None
) -> None:
    """4 MiB are allocated in a segment of 20 MiB."""
    b = TraceBuilder()
    b.alloc(4 * MIB)
    evidence = exhaustion_evidence(b.context(20 * MIB + spare_bytes), per_round, "call")
    assert (None if evidence is None else evidence.text) == (
        None if lasts is None else f"at this rate what is left of the GPU lasts for {lasts} more calls"
    )


def test_rounds_are_not_counted_without_a_gpu() -> None:
    b = TraceBuilder()
    b.alloc(MIB)
    assert exhaustion_evidence(b.context(), MIB, "call") is None
