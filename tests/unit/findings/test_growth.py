"""What piles up from step to step in hand-written traces, and what only looks like it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from memprof.findings import Context, Finding, Severity, growth, memory_growth
from memprof.findings.edits import Edit, EditKind
from memprof.findings.growth import (
    Key,
    LeakGroup,
    by_holder,
    compute_curve,
    compute_median_rise,
    count_idle_iterations,
    describe_holder,
    exhaustion_evidence,
    find_growing_storages,
    find_holder,
    find_idle_holder,
    find_leaks,
    find_step_leaks,
    format_holders,
    holder_evidence,
    holder_fix_evidence,
    holder_key,
    is_growing,
    is_rising_constantly,
    is_running_sum,
    leak_evidence,
    make_key,
)
from memprof.findings.growth_until_peak import GrowthUntilPeak
from memprof.findings.memory_growth import find
from memprof.trace.events import AUTOCAST_KIND, NONE, CycleKind, Forward, Holder, PhaseKind, Role
from memprof.trace.facts import ProgramFacts
from memprof.units import MIB
from tests.unit.findings.figures import figures
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


@pytest.mark.parametrize(("line", "place"), [(KEPT, " of train.py:7"), (None, "")])
def test_the_title_says_what_it_mostly_is(line: str | None, place: str) -> None:
    b = TraceBuilder()
    steps(b, 4, lambda step: (b.new(MILLION, line=line), b.new(MILLION // 2, dtype="int64", op="aten.ones"))[0])
    (finding,) = found(b)
    half = f", mostly [{MILLION}] float32{place}"
    assert f"tensors of each step stay alive{half}" in finding.title


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


def losses_with_graphs() -> TraceBuilder:
    """Return four steps, of each a loss in a list, and what its graph has saved."""
    b = TraceBuilder()
    b.parameter("weight", 100)
    losses: list[int] = []

    def each(step: int) -> None:
        b.new(3 * MILLION, op="aten.gelu", line="model.py:3 forward")
        losses.append(b.new(1, line=KEPT))

    steps(b, 4, each)
    b.trace.holders.append(LOSSES._replace(storages=tuple(losses), nodes=20, node_steps=4))
    return b


def test_what_the_graph_keeps_is_the_same_finding() -> None:
    b = losses_with_graphs()
    (finding,) = found(b)
    assert finding.num_bytes == 3 * (3 * MIB + 512)
    assert any("what it saved for a backward is live with it: 3.00 MiB a step" in e.text for e in finding.evidence)


@pytest.mark.parametrize(
    ("kind", "fix"), [(PhaseKind.BACKWARD, "empty it after"), (PhaseKind.FORWARD, "keep the number")]
)
def test_a_list_whose_graphs_each_backward_goes_through_is_emptied(kind: PhaseKind, fix: str) -> None:
    """Without the graphs, the loss that is computed of the list would have none."""
    b = losses_with_graphs()
    last_use = max(time for time, phase in b.trace.list_phase_begins() if phase.kind is kind) + 1
    b.trace.last_uses = [last_use] * len(b.trace.storages)
    (finding,) = found(b)
    assert finding.evidence[-1].text.startswith(f"fix at x/train.py:9: {fix}")
    assert (finding.edit is None) == (kind is PhaseKind.BACKWARD)


@pytest.mark.parametrize(("num_again", "fix"), [(2, "empty it after"), (1, "keep the number")])
def test_most_of_a_list_is_gone_through_again(num_again: int, fix: str) -> None:
    """Of three steps before the last one, the last backward uses what so many have saved."""
    b = losses_with_graphs()
    last_backward = max(time for time, phase in b.trace.list_phase_begins() if phase.kind is PhaseKind.BACKWARD) + 1
    saved = [index for index, storage in enumerate(b.trace.storages) if b.trace.op(storage) == "aten.gelu"]
    again = saved[:num_again]
    b.trace.last_uses = [last_backward if index in again else 1 for index in range(len(b.trace.storages))]
    (finding,) = found(b)
    assert finding.evidence[-1].text.startswith(f"fix at x/train.py:9: {fix}")


def test_a_running_sum_keeps_graphs_and_nothing_on_the_gpu() -> None:
    b = TraceBuilder()
    b.parameter("weight", 100)
    steps(b, 3, lambda step: None)
    b.trace.holders.append(LOSSES._replace(kind="", name="total", nodes=60, node_steps=3))
    (finding,) = found(b)
    assert finding.num_bytes is None and finding.severity is Severity.NOTE
    assert "variable `total`" in finding.title and "nothing on the GPU" in finding.title


@pytest.mark.parametrize("node_steps", [1, 2])
def test_of_equal_sums_any_may_keep_what_was_saved(node_steps: int) -> None:
    b = kept(4)
    total = LOSSES._replace(kind="", name="Meter.total", nodes=60, node_steps=2)
    b.trace.holders += [total, total._replace(name="Meter.other", source="/x/train.py:8 main", node_steps=node_steps)]
    (finding,) = found(b)
    assert ("`Meter.total` (x/train.py:9) or attribute `Meter.other` (x/train.py:8)" in finding.title) == (
        node_steps > 1
    )
    assert [e.source for e in finding.evidence if e.text.startswith("fix")] == [
        holder.source for holder in b.trace.holders[:node_steps]
    ]
    assert (finding.edit is None) == (node_steps > 1)


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


@pytest.mark.parametrize(("fills", "fix"), [(True, "fix at x/train.py:9: keep of"), (False, "fix: keep of")])
def test_a_variable_that_keeps_graphs_from_pass_to_pass_is_named_with_its_place(fills: bool, fix: str) -> None:
    b = micro_batches(6, 2)
    b.trace.holders.append(LOSSES._replace(kind="", fills=fills, storages=(1, 2, 3), nodes=20))
    (finding,) = found(b)
    place = "" if fills else " (x/train.py:9)"
    assert finding.evidence[-1].text.startswith(f"{fix} variable `losses`{place} for the next pass")


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
    b = calls_before_one_backward(80)
    b.trace.may_train = False  # no backward is to come: it is an evaluation with gradients
    assert not find(b.context(64 * MIB))


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
    assert "backward() for each part" in finding.evidence[-1].text and finding.evidence[-1].source is None


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


# -- what a finding shows of it --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("elements", "severity"),
    [(MILLION, Severity.WARNING), (MILLION - 128, Severity.NOTE), (MILLION // 16, Severity.NOTE)],
)
def test_it_is_a_warning_from_a_mebibyte_a_step_on(elements: int, severity: Severity) -> None:
    (finding,) = find(kept(4, elements=elements).context())
    assert finding.severity is severity


@pytest.mark.parametrize(("elements", "is_told"), [(MILLION // 16, True), (MILLION // 16 - 128, False)])
def test_it_is_told_from_64_kib_a_step_on(elements: int, is_told: bool) -> None:
    assert bool(find(kept(4, LOSSES, elements=elements).context())) == is_told


@pytest.mark.parametrize(
    ("change", "elements", "fix", "edit"),
    [
        ({}, MILLION // 16, ".cpu()", EditKind.KEEP_ON_HOST),
        ({"nodes": 20}, MILLION // 16 - 128, ".item()", EditKind.KEEP_DETACHED),
        ({"kind": CycleKind.GRAD}, MILLION, "create_graph=True", EditKind.TAKE_GRADIENT),
    ],
)
def test_the_fix_is_by_what_the_graph_does_not_keep(
    change: dict[str, Any], elements: int, fix: str, edit: EditKind
) -> None:
    (finding,) = find(kept(4, LOSSES._replace(**change), elements=elements).context())
    assert fix in finding.evidence[-1].text
    assert finding.edit is not None and (finding.edit.kind, finding.edit.source) == (edit, LOSSES.source)


def test_exactly_64_kib_a_step_that_nothing_was_seen_to_keep_are_for_host_memory() -> None:
    (finding,) = find(kept(4, elements=MILLION // 16).context())
    assert ".cpu()" in finding.evidence[-1].text and finding.edit is None


def test_what_a_graph_has_saved_is_no_part_of_what_is_kept() -> None:
    """Numbers of 512 bytes, whose graphs have 3 MiB each: .item() is enough."""
    b = TraceBuilder()
    b.parameter("weight", 100)
    losses: list[int] = []

    def each(step: int) -> None:
        b.new(3 * MILLION, op="aten.gelu", line="model.py:3 forward")
        losses.append(b.new(line=KEPT))

    steps(b, 4, each)
    b.trace.holders.append(LOSSES._replace(storages=tuple(losses), nodes=20, node_steps=4))
    (finding,) = found(b)
    assert finding.edit == Edit(EditKind.KEEP_NUMBER, "/x/train.py:9 main", "losses")
    graph = finding.evidence[3]
    assert figures(graph.text) == ["20", "4", "3.00 MiB"]
    assert (graph.num_bytes, graph.source) == (3 * MIB, LOSSES.source)
    assert ".item()" in finding.evidence[-1].text
    b.trace.holders[0] = b.trace.holders[0]._replace(nodes=0)
    assert not any("autograd graph" in line.text for line in found(b)[0].evidence)


@pytest.mark.parametrize(("usable_mib", "decides"), [(26, True), (18, False)])
def test_says_whether_the_run_fits_without_it(usable_mib: int, decides: bool) -> None:
    """Ten steps leave 1 MiB each beside a small weight; in the last, 20 MiB more are needed."""
    b = kept(10)
    b.phase(PhaseKind.FORWARD, 11)
    b.alloc(20 * MIB)
    b.trace.last_uses = [NONE] * len(b.trace.storages)
    (finding,) = find(b.context(usable_mib * MIB))
    assert finding.is_decisive == decides
    assert finding.title.endswith("; without them the run fits") == decides
    assert "freed after its last use" in finding.evidence[2].text
    b.trace.last_uses = []  # uses are not known
    (finding,) = find(b.context(usable_mib * MIB))
    assert not finding.is_decisive and not any("last use" in line.text for line in finding.evidence)


def test_a_small_growth_without_which_the_run_fits_is_a_warning() -> None:
    b = kept(20, elements=MILLION // 2)
    b.trace.last_uses = [NONE] * len(b.trace.storages)
    assert find(b.context(100 * MIB))[0].severity is Severity.NOTE
    assert find(b.context(8 * MIB))[0].severity is Severity.WARNING


def test_models_that_are_built_in_each_step_are_told_by_another_rule() -> None:
    def run(*, others: bool) -> list[Finding]:
        b = TraceBuilder()
        b.parameter("weight", 100)

        def each(step: int) -> None:
            b.new(MILLION, line=KEPT, owner=(Role.PARAMETER, "a"))
            if others:
                b.new(MILLION, line=KEPT, op="aten.mul")

        steps(b, 5, each)
        return find(b.context())

    assert not run(others=False)
    (finding,) = run(others=True)
    assert "grows by 1.00 MiB a step" in finding.title and finding.num_bytes == 4 * MIB


def test_a_bounded_container_is_told_where_memory_runs_out() -> None:
    b = kept(4, LOSSES._replace(kind="deque", limit=100))
    program = ProgramFacts(("train.py",), "steps", 0, 4, ())
    b.trace.facts = dataclasses.replace(b.trace.facts, command="run", program=program)
    assert find(b.context(60 * MIB)) and not find(b.context(600 * MIB)) and not find(b.context())


@pytest.mark.parametrize(("other_mib", "is_told"), [(10, True), (12, False), (14, False)])
def test_a_bounded_container_is_a_quarter_of_the_memory_that_has_run_out(other_mib: int, is_told: bool) -> None:
    """It has 4 MiB, of a little more than 16 with 12 others; there is no prediction of what has come already."""
    b = kept(4, LOSSES._replace(kind="deque", limit=100))
    b.alloc(other_mib << 20)
    b.trace.ended_out_of_memory = True
    assert bool(find(b.context(8 << 20))) == is_told


@pytest.mark.parametrize(("num_bytes", "is_told"), [(64 << 10, True), ((64 << 10) - 512, False)])
def test_little_that_accumulates_until_the_peak_is_let_pass(num_bytes: int, is_told: bool) -> None:
    """Here it is more than a twentieth of the peak, which has little else."""
    b = TraceBuilder()
    made: list[int] = []
    for step in range(1, 8):
        b.phase(PhaseKind.FORWARD, step)
        if step == 6:
            b.free(b.alloc(1024))
            b.free(*made)
        if step < 6:
            made.append(b.alloc(num_bytes, line=KEPT))
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
    assert bool(found(b)) == is_told


def test_what_accumulates_until_the_peak_may_decide_whether_the_run_fits() -> None:
    b = cleared(30, then=2)
    b.trace.last_uses = [NONE] * len(b.trace.storages)
    (finding,) = find(b.context(24 * MIB))
    assert finding.is_decisive and finding.title.endswith("; without them the run fits")
    assert finding.edit == Edit(EditKind.KEEP_ON_HOST, "/x/train.py:9 main", "losses")
    assert figures(finding.evidence[1].text)[3:] == ["train.py:7", "1.00 MiB", "30"]
    b.trace.last_uses = []
    (finding,) = find(b.context(24 * MIB))
    assert not finding.is_decisive


def test_what_micro_batches_keep_with_its_graph_is_to_be_detached() -> None:
    b = micro_batches(6, 1)
    made = [index for index, one in enumerate(b.trace.storages) if b.trace.source_line(one) == KEPT]
    b.trace.holders.append(LOSSES._replace(storages=tuple(made), nodes=20))
    (finding,) = found(b)
    assert finding.edit == Edit(EditKind.KEEP_DETACHED, "/x/train.py:9 main", "losses")
    assert "for the next pass" in finding.evidence[-1].text
    b.trace.holders[0] = b.trace.holders[0]._replace(nodes=0)
    assert found(b)[0].edit == Edit(EditKind.KEEP_ON_HOST, "/x/train.py:9 main", "losses")


def test_a_graph_that_steps_keep_until_the_peak_is_not_for_the_next_pass() -> None:
    (finding,) = found(cleared(6, then=2, holder=LOSSES._replace(nodes=20)))
    assert finding.edit == Edit(EditKind.KEEP_ON_HOST, "/x/train.py:9 main", "losses")
    assert "of each step in host memory" in finding.evidence[-1].text


def test_covered_storages_are_those_of_the_findings() -> None:
    b = kept(4)
    kept_ones = {index for index, one in enumerate(b.trace.storages) if b.trace.source_line(one) == KEPT}
    assert memory_growth.find_covered_storages(b.context()) == kept_ones
    assert not memory_growth.find_covered_storages(kept(4, elements=1).context())


def test_calls_are_freed_at_their_ends() -> None:
    """What a call has made, and is not over by then, is not."""
    b = calls_before_one_backward(4)
    context = b.context()
    until_peak = GrowthUntilPeak("call", 4, [forward.end - 1 for forward in b.trace.forwards[:3]], {})
    assert memory_growth._find_ends_of_calls(context, until_peak, [1, 2, 3, 4]) == {
        index: forward.end for index, forward in enumerate(b.trace.forwards[:3], 1)
    }


# -- function by function --------------------------------------------------------------------------------------------


def lives(*spans: tuple[int, int, int]) -> Context:
    """Tensors of so many MiB, each allocated at an event and freed at another, which is 0 if it is not."""
    b = TraceBuilder()
    indices: dict[int, int] = {}
    for event in range(1, 1 + max(max(span[:2]) for span in spans)):
        for number, (birth, death, mib) in enumerate(spans):
            if birth == event:
                indices[number] = b.alloc(mib * MIB)
            elif death == event:
                b.free(indices[number])
    return b.context()


@pytest.mark.parametrize(("survivors_only", "curve"), [(False, [3, 4, 4]), (True, [0, 1, 4])])
def test_bytes_at_the_end_of_each_round(survivors_only: bool, curve: list[int]) -> None:
    """Rounds end with events 2, 4 and 6: 1 MiB stays from event 1 on, 2 until event 3, 3 from event 4 on, 7 until 6."""
    context = lives((1, 0, 1), (2, 3, 2), (4, 0, 3), (5, 6, 7), (7, 0, 9))
    found = compute_curve(context, [0, 1, 2, 3, 4], [2, 4, 6], survivors_only=survivors_only)
    assert found == [mib * MIB for mib in curve]


@pytest.mark.parametrize(
    ("curve", "num_idle", "expected"),
    [
        ([0, 1, 2], 1, False),
        ([0, 1, 1, 2, 2, 3], 1, True),
        ([0, 1, 1, 2, 2, 3], 2, False),
        ([0, 1, 1, 1, 2, 2, 2, 3, 3], 0, True),
        ([0, 1, 1, 1, 2, 2, 2, 3, 3], 2, True),
        ([0, 1, 1, 1, 2, 2, 2, 3, 3], 3, False),
        ([0, 1, 1, 2], 0, False),  # two rises may be two optimizers' steps, unless each iteration rises
        ([1, 2, 2, 2, 2], 0, False),
    ],
)
def test_rounds_that_allocate_nothing_are_fewer_than_between_two_rises(
    curve: list[int], num_idle: int, expected: bool
) -> None:
    assert is_growing(curve, num_idle) is expected


@pytest.mark.parametrize(("members", "num_idle"), [([0], 2), ([1], 2), ([2], 1), ([3, 0], 1), ([0, 4], 0)])
def test_rounds_after_that_of_the_newest(members: list[int], num_idle: int) -> None:
    """Rounds end with events 2, 4 and 6; there is an allocation at each event from 1 to 5."""
    context = lives(*((event, 0, 1) for event in range(1, 6)))
    assert count_idle_iterations(context, members, [2, 4, 6]) == num_idle


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([1, 2, 3, 4], True),
        ([2, 4, 6, 8], True),
        ([1, 2, 3], False),
        ([1, 2, 2, 3, 4], True),
        ([1, 2, 2, 3], False),
        ([1, 2, 4, 5], False),
        ([1, 2, 3, 4, 3], False),
    ],
)
def test_always_as_many_more_three_times_at_least(counts: list[int], expected: bool) -> None:
    b = TraceBuilder()
    live: list[int] = []
    members: list[int] = []
    ends: list[int] = []
    for count in counts:
        anew = [b.alloc(MIB) for _ in range(count)]
        b.free(*live)
        live = anew
        members += anew
        ends.append(len(b.trace.events) - 1)
    assert is_rising_constantly(b.context(), members, ends) is expected


@pytest.mark.parametrize(
    ("curve", "median", "each"),
    [
        ([0, 1, 3, 6], 2, 2),
        ([0, 5, 6, 7, 8], 1, 1),
        ([4, 4, 5, 7], 1, 1),  # from the first rise on; the lower of two
        ([0, 3, 3, 6], 3, 2),  # not each adds some: the mean
        ([0, 4, 4, 4, 8], 4, 2),
    ],
)
def test_what_a_round_adds_is_the_median_or_the_mean(curve: list[int], median: int, each: int) -> None:
    assert compute_median_rise(curve) == median
    assert growth._compute_bytes_per_iteration(curve) == each


@pytest.mark.parametrize(("first_mib", "is_leak"), [(6, True), (7, False)])
def test_a_joined_result_is_what_the_rounds_have_added(first_mib: int, is_leak: bool) -> None:
    """Five results, each by 2 MiB larger: they are a leak up to twice as much as five rounds add, 20 MiB."""
    b = TraceBuilder()
    made: list[int] = []
    ends = []
    for number in range(5):
        made.append(b.alloc((first_mib * 2 + 2 * number) * MIB, op="aten.stack"))
        b.free(*made[-2:-1])
        ends.append(len(b.trace.events) - 1)
    found = find_leaks(b.context(), made, ends)
    assert [(one.num_bytes, one.bytes_each, one.is_recreated) for one in found] == [(8 * MIB, 2 * MIB, True)] * is_leak


def test_leaks_by_line_operator_and_module_the_largest_first() -> None:
    b = TraceBuilder()
    made: list[int] = []
    ends = []
    for _ in range(4):
        for layer in range(2):
            b.enter(f"layers.{layer}")
            made.append(b.alloc(2 * MIB))
            b.leave()
        made += [b.alloc(10 * MIB), b.alloc(6 * MIB, op="aten.mul"), b.alloc(8 * MIB, line=KEPT)]
        ends.append(len(b.trace.events) - 1)
    found = find_leaks(b.context(), made, ends)
    assert [(one.num_bytes // MIB, one.bytes_each // MIB, len(one.storages)) for one in found] == [
        (30, 10, 4), (24, 8, 4), (18, 6, 4), (12, 4, 8),
    ]  # fmt: skip
    assert found[3].key == (found[0].key[0], found[0].key[1], "layers.*") and not found[0].is_recreated


def test_what_is_made_as_the_first_step_begins_is_of_the_steps() -> None:
    b = TraceBuilder(None)
    for step in range(1, 5):
        b.phase(PhaseKind.FORWARD, step)
        b.alloc(MIB)
        b.phase(PhaseKind.OPTIMIZER_STEP, step)
    (leaks,) = find_step_leaks(b.context()).values()
    assert [len(one.storages) for one in leaks] == [4]


@pytest.mark.parametrize(
    ("change", "is_leak"),
    [
        ({}, True),
        ({"device": "cpu"}, False),
        ({"hidden": True}, False),
        ({"owner": (Role.BUFFER, "a")}, False),
        ({"owner": (Role.INPUT, "a")}, True),
        ({"owner": (Role.GRADIENT, "a")}, True),  # all but the newest of this name
        ({"owner": (Role.PARAMETER, "a")}, True),
        ({"owner": (Role.OPTIMIZER_STATE, "a")}, False),
    ],
)
def test_what_may_pile_up(change: dict[str, Any], is_leak: bool) -> None:
    b = TraceBuilder()
    b.parameter("weight", 100)
    steps(b, 5, lambda step: [b.new(MILLION, line=KEPT, **change) for _ in range(2)] and None)
    found = [len(one.storages) for leaks in find_step_leaks(b.context()).values() for one in leaks]
    assert found == [9 if change == {"owner": (Role.GRADIENT, "a")} else 10] * is_leak


def test_state_and_gradients_of_models_that_are_built_in_training() -> None:
    b = TraceBuilder()
    b.parameter("weight", 100)

    def each(step: int) -> None:
        for role in (Role.PARAMETER, Role.OPTIMIZER_STATE, Role.GRADIENT):
            b.new(MILLION, op=f"aten.{role.name}", line=KEPT, owner=(role, f"{step}"))

    steps(b, 5, each)
    (leaks,) = find_step_leaks(b.context()).values()
    ops = {b.trace.op(b.trace.storages[one.storages[0]]) for one in leaks}
    assert ops == {"aten.PARAMETER", "aten.OPTIMIZER_STATE"}


@pytest.mark.parametrize(("num_models", "is_leak"), [(1, True), (2, False)])
def test_gradients_of_the_same_name_are_replaced_if_they_are_of_one_model(num_models: int, is_leak: bool) -> None:
    """Models that are trained in turn get their gradients one after another, and each keeps its own."""
    b = TraceBuilder()
    for _ in range(num_models):
        b.parameter("a", 100)
    gradients: list[int] = []
    steps(b, 5, lambda step: gradients.extend(b.new(MILLION, line=KEPT, owner=(Role.GRADIENT, "a")) for _ in "ab"))
    assert bool(find_step_leaks(b.context())) == is_leak


# -- holders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "list `losses`"),
        ({"kind": ""}, "variable `losses`"),
        ({"kind": "", "name": "self.losses"}, "attribute `self.losses`"),
        ({"name": "self.losses"}, "list `self.losses`"),
        ({"kind": CycleKind.OBJECTS, "name": "A.b -> A"}, "a reference cycle, A.b -> A"),
    ],
)
def test_a_holder_is_named_by_its_kind(change: dict[str, Any], text: str) -> None:
    holder = LOSSES._replace(**change)
    assert describe_holder(holder) == text
    assert format_holders(None, holder) == f", kept by {text} (x/train.py:9)"
    assert format_holders(holder._replace(fills=False)) == f", kept by {text}"
    assert format_holders(None) == ""
    twice = f", kept by {text} (x/train.py:9) and {text} (x/train.py:9)"
    assert format_holders(holder, holder) == twice


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({}, ", filled at x/train.py:9"),
        ({"fills": False}, " of x/train.py:9"),
        ({"source": None}, ""),
        ({"kind": CycleKind.OBJECTS}, ", closed at x/train.py:9"),
    ],
)
def test_the_line_of_a_holder(change: dict[str, Any], place: str) -> None:
    holder = LOSSES._replace(**change)
    evidence = holder_evidence(holder)
    assert evidence.text == f"kept by {describe_holder(holder)}{place}" and evidence.source == holder.source


@pytest.mark.parametrize(
    ("holder", "text"),
    [
        (None, "fix: drop it"),
        (LOSSES, "fix at x/train.py:9: drop it"),
        (LOSSES._replace(fills=False), "fix: drop it"),
        (LOSSES._replace(has_reset=True), "fix at x/train.py:9: call reset() at the end of each epoch, or drop it"),
        (LOSSES._replace(has_reset=True, nodes=3, kind=""), "fix at x/train.py:9: drop it"),  # a state with its graph
        (
            LOSSES._replace(has_reset=True, nodes=0, kind=""),
            "fix at x/train.py:9: call reset() at the end of each epoch, or drop it",
        ),
    ],
)
def test_the_fix_is_at_the_line_that_fills_the_holder(holder: Holder | None, text: str) -> None:
    evidence = holder_fix_evidence(holder, "drop it")
    assert evidence.text == text
    assert evidence.source == (LOSSES.source if " at " in text.partition(":")[0] else None)


@pytest.mark.parametrize("change", [{"kind": "dict"}, {"name": "outputs"}, {"source": "/x/train.py:10 main"}])
def test_holders_are_the_same_by_kind_name_and_line(change: dict[str, str]) -> None:
    assert holder_key(LOSSES) == holder_key(LOSSES._replace(event=5, storages=(1,), nodes=3))
    assert holder_key(LOSSES) != holder_key(LOSSES._replace(**change)) and holder_key(None) == ()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"kind": "", "node_steps": 2}, True),
        ({"kind": "", "node_steps": 1}, False),
        ({"kind": "list", "node_steps": 2}, False),
    ],
)
def test_a_running_sum_is_a_tensor_with_a_graph_of_several_steps(change: dict[str, Any], expected: bool) -> None:
    assert is_running_sum(LOSSES._replace(**change)) is expected


GRAPH = LOSSES._replace(storages=(1,), nodes=5, node_steps=2)


def leaking() -> tuple[TraceBuilder, LeakGroup, set[Key]]:
    """Three kinds of tensors; the leak is the first of them, and leaks are the first two."""
    b = TraceBuilder()
    made = [b.alloc(MIB, op=op) for op in ("aten.a", "aten.b", "aten.c", "aten.a")]
    keys = [make_key(b.trace, index) for index in made]
    return b, LeakGroup(keys[0], (0,), MIB, MIB), {keys[0], keys[1]}


@pytest.mark.parametrize(
    ("holders", "expected"),
    [
        ([], None),
        ([LOSSES._replace(storages=(2,))], None),
        ([LOSSES._replace(storages=(1,))], None),  # which has no graph
        ([LOSSES._replace(storages=(1,), nodes=5)], 0),
        ([LOSSES._replace(storages=(2,), nodes=5)], None),
        ([LOSSES._replace(kind="", nodes=5, node_steps=2)], 0),
        ([LOSSES._replace(kind="", nodes=0, node_steps=2)], None),
        ([LOSSES._replace(storages=(1,), nodes=5), LOSSES._replace(name="a", storages=(0,))], 1),
        ([LOSSES._replace(storages=(0,)), LOSSES._replace(name="a", storages=(0, 3))], 1),
        ([GRAPH._replace(nodes=9, node_steps=1), GRAPH._replace(name="a")], 1),
        ([GRAPH._replace(nodes=9), GRAPH._replace(name="a")], 0),
    ],
)
def test_who_keeps_a_leak(holders: list[Holder], expected: int | None) -> None:
    """Who has its kind, most of it; else who has the largest graph of a leak, or of a sum."""
    b, leak, keys = leaking()
    b.trace.holders = holders
    assert find_holder(b.trace, leak, keys) == (None if expected is None else holders[expected])


def test_the_observation_with_the_most_nodes_stands_for_a_holder() -> None:
    b, leak, _ = leaking()
    other = LeakGroup(make_key(b.trace, 2), (2,), MIB, MIB)
    b.trace.holders = [
        LOSSES._replace(storages=(0,), nodes=2),
        LOSSES._replace(storages=(), nodes=7),
        LOSSES._replace(name="a", nodes=9),
    ]
    # The other leak is of no holder, and is taken for what its graph has saved.
    assert by_holder(b.trace, [leak, other]) == {b.trace.holders[1]: [leak, other]}
    b.trace.holders = b.trace.holders[:1]
    b.trace.holders[0] = LOSSES._replace(storages=(0,))
    assert by_holder(b.trace, [leak, other]) == {b.trace.holders[0]: [leak], None: [other]}


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((), None),
        ((((2,), "list"),), None),
        ((((0,), "list"), ((0, 1, 2), "dict")), 1),
        ((((0,), "list"), ((0, 1), AUTOCAST_KIND)), 0),
    ],
)
def test_what_was_seen_to_keep_most_unused(
    kinds: tuple[tuple[tuple[int, ...], str], ...], expected: int | None
) -> None:
    b = TraceBuilder()
    b.trace.idle_holders = [LOSSES._replace(kind=kind, storages=storages) for storages, kind in kinds]
    found = find_idle_holder(b.trace, [0, 1])
    assert found == (None if expected is None else b.trace.idle_holders[expected])


def test_the_rest_of_many_kinds_is_one_line() -> None:
    """Of eight kinds, from 1 to 8 MiB a step, six are shown."""
    b = TraceBuilder()
    made = [b.new(mib * MILLION, op=f"aten.op{mib}", line=KEPT) for mib in range(1, 9)]
    leaks = [LeakGroup(make_key(b.trace, index), (index, index), MIB, mib * MIB) for mib, index in enumerate(made, 1)]
    lines = leak_evidence(b.trace, leaks, "step")
    assert [line.num_bytes for line in lines] == [mib * MIB for mib in (8, 7, 6, 5, 4, 3, 3)]
    assert figures(lines[0].text) == ["[2097152]", "float32", "aten.op8", "train.py:7", "8.00 MiB", "2"]
    assert figures(lines[-1].text) == ["2", "3.00 MiB"] and lines[-1].text.endswith("more a step")
    assert len(leak_evidence(b.trace, leaks[:6], "step")) == 6


def test_the_largest_tensor_of_a_leak_is_shown_the_last_of_equal_ones() -> None:
    b = TraceBuilder()
    b.enter("layers.0")
    made = [b.new(*shape, line=KEPT) for shape in ((4, 4), (8, 8), (16, 4), (2, 2))]
    b.leave()
    (line,) = leak_evidence(b.trace, [LeakGroup(make_key(b.trace, made[0]), tuple(made), 1, 1)], "call")
    assert line.shape == (16, 4) and "in layers.* at train.py:7" in line.text and "more a call" in line.text


def test_what_steps_pile_up_counts_in_a_step_that_has_not_ended() -> None:
    b = kept(4)
    b.phase(PhaseKind.FORWARD, 5)
    late = [b.new(MILLION, line=KEPT), b.new(MILLION, line=KEPT)]
    b.new(MILLION, line="train.py:8 main")
    made = [index for index, one in enumerate(b.trace.storages) if b.trace.source_line(one) == KEPT]
    assert find_growing_storages(b.context()) == set(made) and set(late) < set(made)


def test_what_was_made_before_the_first_forward_counts_with_what_steps_pile_up() -> None:
    """As the first step's noise, which is kept by a graph like that of the others."""
    b = TraceBuilder()
    first = b.new(MILLION, line=KEPT)
    other = b.new(MILLION, line="train.py:8 main")
    steps(b, 5, lambda step: b.new(MILLION, line=KEPT) and None)
    found = find_growing_storages(b.context())
    assert first in found and other not in found


def test_models_that_are_built_in_training_are_no_growing_storages() -> None:
    b = TraceBuilder()
    b.parameter("weight", 100)
    steps(b, 5, lambda step: b.new(MILLION, line=KEPT, owner=(Role.PARAMETER, "a")) and None)
    context = b.context()
    assert find_step_leaks(context) and not find_growing_storages(context)
