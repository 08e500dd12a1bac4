"""What piles up from step to step in hand-written traces, and what only looks like it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from memprof.findings import Finding, Severity, memory_growth
from memprof.findings.edits import Edit, EditKind
from memprof.findings.memory_growth import find
from memprof.trace.events import NONE, CycleKind, Holder, PhaseKind, Role
from memprof.trace.facts import ProgramFacts
from memprof.units import MIB
from tests.unit.findings.figures import figures
from tests.unit.findings.growing import KEPT, LOSSES, MILLION, kept, steps
from tests.unit.traces import TraceBuilder


def found(b: TraceBuilder) -> list[Finding]:
    return find(b.context(1000 * MIB))


@pytest.mark.parametrize(("line", "place"), [(KEPT, " of train.py:7"), (None, "")])
def test_the_title_says_what_it_mostly_is(line: str | None, place: str) -> None:
    b = TraceBuilder()
    steps(b, 4, lambda step: (b.new(MILLION, line=line), b.new(MILLION // 2, dtype="int64", op="aten.ones"))[0])
    (finding,) = found(b)
    assert f" a step, mostly [{MILLION}] float32{place}" in finding.title


def test_what_each_step_leaves_behind() -> None:
    (finding,) = found(kept(4, LOSSES))
    assert finding.severity is Severity.WARNING and finding.id == "memory-growth"
    assert "grows by 1.00 MiB a step, mostly " in finding.title
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


@pytest.mark.parametrize(("held_mib", "is_view"), [(1, True), (1.01, False)])
def test_a_view_of_half_a_tensor_is_to_be_a_copy(held_mib: float, is_view: bool) -> None:
    (finding,) = found(kept(4, LOSSES._replace(held_bytes=int(held_mib * MIB))))  # two of 1 MiB were seen
    fix = finding.evidence[-1]
    assert fix.source == LOSSES.source
    assert (".clone()" in fix.text and "a view of 512.00 KiB" in fix.text) == is_view


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
    assert "variable `total`" in finding.title and "no tensors on the GPU" in finding.title


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


@pytest.mark.parametrize(
    ("name", "node_steps", "is_joined"), [("net.0.var", 3, True), ("net.1.var", 3, False), ("net.0.var", 2, False)]
)
def test_sums_of_one_object_that_keep_nothing_on_the_gpu_are_told_together(
    name: str, node_steps: int, is_joined: bool
) -> None:
    b = TraceBuilder()
    weight = b.parameter("weight", 100)
    steps(b, 3, lambda step: None)
    mean = LOSSES._replace(kind="", name="net.0.mean", nodes=60, node_steps=3, storages=(weight,))
    b.trace.holders += [mean, mean._replace(name=name, source="/x/net.py:8 forward", node_steps=node_steps)]
    first, *others = found(b)
    assert len(others) == (not is_joined)
    assert ("`net.0.mean` (x/train.py:9) and attribute `net.0.var` (x/net.py:8)" in first.title) == is_joined
    fixes = [one for one in first.evidence if one.text.startswith("fix at ")]
    assert len(fixes) == 1 + is_joined and all("detach" in one.text and ".item" not in one.text for one in fixes)


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
    assert "grows by 1.00 MiB a step, to 6.00 MiB, kept by list `losses`" in finding.title
    assert finding.evidence[-1].text.startswith("fix at x/train.py:9: keep the tensors of each step in host memory")


class TestSilentOn:
    @pytest.mark.parametrize("each", [2, 3])
    def test_what_is_cleared_soon(self, each: int) -> None:
        assert not found(cleared(each, then=2))

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
    assert finding.is_decisive
    assert finding.edit == Edit(EditKind.KEEP_ON_HOST, "/x/train.py:9 main", "losses")
    assert figures(finding.evidence[1].text)[3:] == ["train.py:7", "1.00 MiB", "30"]
    b.trace.last_uses = []
    (finding,) = find(b.context(24 * MIB))
    assert not finding.is_decisive


def test_a_graph_that_steps_keep_until_the_peak_is_not_for_the_next_pass() -> None:
    (finding,) = found(cleared(6, then=2, holder=LOSSES._replace(nodes=20)))
    assert finding.edit == Edit(EditKind.KEEP_ON_HOST, "/x/train.py:9 main", "losses")
    told = "keep the tensors of each step in host memory (.detach().cpu()), or drop those that are not needed"
    assert told in finding.evidence[-1].text


def test_covered_storages_are_those_of_the_findings() -> None:
    b = kept(4)
    kept_ones = {index for index, one in enumerate(b.trace.storages) if b.trace.source_line(one) == KEPT}
    assert memory_growth.find_covered_storages(b.context()) == kept_ones
    assert not memory_growth.find_covered_storages(kept(4, elements=1).context())


@pytest.mark.parametrize(
    ("names", "change"),
    [
        (["state"], "detach it here: state = state.detach()"),
        (["state[1]"], "detach it here: state = tuple(part.detach() for part in state)"),
        (["h", "c['a']"], "detach them here: h = h.detach(); c['a'] = c['a'].detach()"),
        (["Net.state"], "call .detach() on `Net.state` here"),  # of a class: no code for its object
        (["h", "Net.state[0]"], "call .detach() on `h` and `Net.state` here"),
    ],
)
def test_states_that_are_carried_on_are_detached_by_their_names(names: list[str], change: str) -> None:
    holders = [LOSSES._replace(kind="", name=name) for name in names]
    context = kept(4, LOSSES).context(1000 * MIB)
    assert memory_growth._make_carried_fix(context, holders, [], "here") == change


@pytest.mark.parametrize("sizes", [(4, 16, 8), (16, 4, 8)])
def test_of_states_that_are_carried_on_the_largest_comes_first(sizes: tuple[int, ...]) -> None:
    b = TraceBuilder()
    state = LOSSES._replace(kind="", node_steps=2)
    holders = [state._replace(name=f"s{size}", storages=(b.new(size),)) for size in sizes]
    assert [one.name for one in memory_growth._list_carried(b.trace, holders)] == ["s16", "s8", "s4"]
    apart = holders[0]._replace(source="/x/train.py:10 main")
    assert not memory_growth._list_carried(b.trace, [apart, *holders[1:]])


@pytest.mark.parametrize(
    ("op", "elements", "kind", "are_copies"),
    [
        ("aten.clone", (MILLION, 2 * MILLION), "list", True),
        ("aten.mul", (MILLION, 2 * MILLION), "list", False),
        ("aten.clone", (MILLION,), "list", False),  # may be a batch that has the shape of a parameter
        ("aten.clone", (3 * MILLION, 4 * MILLION), "list", False),
        ("aten.clone", (MILLION, 2 * MILLION), "", False),
    ],
)
def test_copies_of_models_in_a_list_have_no_graph_to_detach(
    op: str, elements: tuple[int, ...], kind: str, are_copies: bool
) -> None:
    """As the best model of each fold, copied with copy.deepcopy."""
    b = TraceBuilder()
    for number in range(1, 5):
        b.parameter("weight", number % 3 * MILLION)
    made: list[int] = []
    steps(b, 4, lambda step: made.extend(b.new(size, op=op, line=KEPT) for size in elements))
    b.trace.holders.append(LOSSES._replace(kind=kind, storages=tuple(made[:4])))
    (finding,) = find(b.context())
    assert ("keep these copies in host memory" in finding.evidence[-1].text) is are_copies
