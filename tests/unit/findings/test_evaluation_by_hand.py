"""What calls of a model without a backward leave, in hand-written traces: each size is worked out by hand."""

from __future__ import annotations

import pytest

from memprof.findings import Finding, Severity, calls, evaluation_accumulates, evaluation_with_gradients
from memprof.findings.edits import Edit, EditKind
from memprof.trace.events import NONE, EvalCall, FirstStep, Forward, Holder, Owner, PhaseKind, Role
from memprof.units import KIB, MIB
from tests.unit.findings.figures import all_figures, figures
from tests.unit.traces import TraceBuilder

OUTPUTS = Holder(0, "list", "outputs", "/x/eval.py:9 main", True, None, (), 0, 0, 40)
CALL = "eval.py:5 main"


class EvaluationBuilder(TraceBuilder):
    """Builds a trace with calls: `call` makes tensors inside a module, of which the first is its output."""

    def call(
        self,
        *sizes: int,
        nodes: int = 0,
        training: bool = False,
        path: str = "",
        line: str = CALL,
        num_outputs: int = 1,
    ) -> list[int]:
        begin = len(self.trace.events)
        self.enter(path, "Net")
        made = [self.alloc(size, op=f"aten.op{n}", line="model.py:3 forward") for n, size in enumerate(sizes)]
        module = self.trace.modules.index(self.trace.modules[self._calls[-1]])
        self.leave()
        source = self._index(self.trace.sources, line)
        outputs = tuple(made[:num_outputs])
        self.trace.forwards.append(Forward(begin, len(self.trace.events), module, source, training, nodes, outputs))
        return made


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def accumulated(num_bytes: int = 2 * MIB, number: int = 5, **settings: object) -> EvaluationBuilder:
    """Calls whose outputs stay; each frees a tensor of 4 MiB as it ends."""
    b = EvaluationBuilder(PhaseKind.FORWARD)
    for _ in range(number):
        b.free(b.call(num_bytes, 4 * MIB, **settings)[1])  # type: ignore[arg-type]
    return b


# -- evaluation-accumulates ------------------------------------------------------------------------------------------


def test_outputs_that_stay_and_how_long_the_gpu_has_room() -> None:
    b = accumulated()
    b.trace.holders.append(OUTPUTS._replace(storages=(0, 2)))
    context = b.context(60 * MIB)
    assert context.ledger.peak_reserved_bytes == 20 * MIB
    finding = only(evaluation_accumulates.find(context))
    assert (finding.severity, finding.num_bytes) == (Severity.WARNING, 10 * MIB)
    assert all_figures(finding) == [
        ["5", "2.00 MiB", "10.00 MiB", "x/eval.py:9"],
        ["x/eval.py:9"],
        ["[2097152]", "uint8", "aten.op0", "model.py:3", "2.00 MiB", "5"],
        ["40", "80.00 MiB"],
        ["20"],
        ["x/eval.py:9"],
    ]
    assert finding.title.startswith("Outputs of 5 calls of Net") and "list `outputs`" in finding.title
    assert finding.evidence[2].num_bytes == 80 * MIB
    assert finding.edit == Edit(EditKind.KEEP_OUTPUTS_ON_HOST, OUTPUTS.source or "", "outputs")
    assert evaluation_accumulates.find_kept_storages(context) == {0, 2, 4, 6, 8}
    assert len(evaluation_accumulates.find_kept_keys(context)) == 1


@pytest.mark.parametrize(
    ("num_outputs", "title"),
    [
        (0, "Inputs or targets of 4 calls of Net stay on the GPU: 1.00 MiB a call, 4.00 MiB in all"),
        (1, "Outputs, and inputs or targets, of 5 calls of Net stay on the GPU: 3.00 MiB a call, 14.00 MiB"),
    ],
)
def test_what_was_moved_for_a_call_is_no_output_of_it(num_outputs: int, title: str) -> None:
    """The labels of the first call are there before the loop begins with it."""
    b = EvaluationBuilder(PhaseKind.FORWARD)
    labels, outputs = [], []
    for _ in range(5):
        labels.append(b.alloc(MIB, op="aten._to_copy", line="eval.py:4 main"))
        output = b.call(2 * MIB)
        outputs += output
        b.free(*output[num_outputs:])
    b.trace.holders.append(OUTPUTS._replace(name="labels", storages=tuple(labels[:2]), source="/x/eval.py:10 main"))
    b.trace.holders += [OUTPUTS._replace(storages=tuple(outputs[:2]))] * num_outputs
    finding = only(evaluation_accumulates.find(b.context()))
    assert finding.title.startswith(title) and finding.culprit is not None
    assert finding.culprit.name == " and ".join(["list `outputs`"] * num_outputs + ["list `labels`"])
    fixes = [one.text for one in finding.evidence if one.text.startswith("fix")]
    assert "fix at x/eval.py:10: keep it in host memory: .cpu(), or what it was before it was moved" in fixes
    assert len(fixes) == 1 + num_outputs


@pytest.mark.parametrize(("num", "more"), [(2, ""), (3, " and 1 more")])
def test_of_what_keeps_tensors_two_are_named_in_the_breakdown(num: int, more: str) -> None:
    b = EvaluationBuilder(PhaseKind.FORWARD)
    for _ in range(5):
        b.call(*[2 * MIB] * num, num_outputs=num)
    b.trace.holders += [OUTPUTS._replace(name=f"kept{index}", storages=(index, index + num)) for index in range(num)]
    culprit = only(evaluation_accumulates.find(b.context())).culprit
    assert culprit is not None and culprit.name == f"list `kept0` and list `kept1`{more}"


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("list", "Outputs of 5 calls of Net"),
        ("", "Outputs of 5 calls of Net"),
        ("MulticlassAccuracy", "Tensors of 5 batches"),
        (None, "Outputs of 5 calls of Net"),
    ],
)
def test_what_a_metric_keeps_is_its_own(kind: str | None, what: str) -> None:
    b = accumulated()
    b.trace.holders += [] if kind is None else [OUTPUTS._replace(kind=kind, storages=(0, 2))]
    assert only(evaluation_accumulates.find(b.context())).title.startswith(f"{what} stay on the GPU: 2.00 MiB a ")


@pytest.mark.parametrize(
    ("held_bytes", "is_told"),
    [(None, False), (2 * MIB - 2, True), (2 * MIB, True), (2 * MIB + 2, False), (4 * MIB, False)],
)
def test_views_keep_whole_tensors(held_bytes: int | None, is_told: bool) -> None:
    b = accumulated()
    b.trace.holders.append(OUTPUTS._replace(storages=(0, 2), held_bytes=held_bytes))
    (fix,) = [one for one in only(evaluation_accumulates.find(b.context())).evidence if one.text.startswith("fix")]
    assert (".clone()" in fix.text) == is_told and ("what is needed of it later" in fix.text) != is_told
    if is_told:
        assert "a view of 1" in fix.text and "whole tensor of 2.00 MiB" in fix.text


@pytest.mark.parametrize(
    ("num_bytes", "severity"),
    [(MIB, Severity.WARNING), (MIB - 512, Severity.NOTE), (64 * KIB, Severity.NOTE), (64 * KIB - 512, None)],
)
def test_outputs_are_told_from_64_kib_a_call_on_and_warned_of_from_a_mebibyte_on(
    num_bytes: int, severity: Severity | None
) -> None:
    found = evaluation_accumulates.find(accumulated(num_bytes).context())
    assert [one.severity for one in found] == ([] if severity is None else [severity])


@pytest.mark.parametrize("other", [{"nodes": 5}, {"num_outputs": 0}])
def test_silent_on_calls_with_gradients_and_on_what_a_model_keeps_in_eval_mode(other: dict[str, int]) -> None:
    assert not evaluation_accumulates.find(accumulated(**other).context())


@pytest.mark.parametrize(("uses", "is_told"), [("none", True), ("own", True), ("next", False), ("unknown", False)])
def test_what_hooks_keep_in_training_mode_and_no_later_call_uses(uses: str, is_told: bool) -> None:
    b = accumulated(training=True, num_outputs=0)
    ends = [forward.end for forward in b.trace.forwards]
    last_uses = {
        "none": [NONE] * len(b.trace.storages),
        "own": [end for end in ends for _ in range(2)],
        "next": [end + 1 for end in ends for _ in range(2)],
        "unknown": [],
    }
    b.trace.last_uses = last_uses[uses]
    found = evaluation_accumulates.find(b.context())
    assert bool(found) == is_told
    for one in found:
        assert one.title.startswith("Tensors of 5 calls of Net")
        assert "call eval() before eval.py:5" in one.evidence[-1].text and one.evidence[-1].source == CALL


def test_eval_is_to_come_before_the_last_of_calls_at_two_lines() -> None:
    b = accumulated(number=4, training=True, num_outputs=0)
    b.free(b.call(2 * MIB, 4 * MIB, training=True, num_outputs=0, line="eval.py:8 main")[1])
    b.trace.last_uses = [NONE] * len(b.trace.storages)
    assert "before eval.py:8" in only(evaluation_accumulates.find(b.context())).evidence[-1].text


@pytest.mark.parametrize("is_held", [True, False])
def test_what_hooks_keep_in_eval_mode_counts_if_something_was_seen_to_keep_it(is_held: bool) -> None:
    b = accumulated(num_outputs=0)
    b.trace.last_uses = [forward.end for forward in b.trace.forwards for _ in range(2)]
    if is_held:
        b.trace.holders.append(OUTPUTS._replace(storages=(0, 2)))
    found = evaluation_accumulates.find(b.context())
    assert [one.title.partition(" stay")[0] for one in found] == ["Tensors of 5 calls of Net"] * is_held
    assert all("in host memory (.cpu())" in one.evidence[-1].text for one in found)  # it is in eval mode already


def test_what_the_loop_makes_of_outputs_outside_of_the_model_counts() -> None:
    b = EvaluationBuilder(PhaseKind.FORWARD)
    for _ in range(5):
        b.free(*b.call(4 * MIB))
        b.alloc(2 * MIB, line="eval.py:7 main")
    b.call(4 * MIB)
    assert only(evaluation_accumulates.find(b.context())).num_bytes == 10 * MIB


def test_a_full_container_and_what_grows_over_steps_are_no_findings() -> None:
    b = accumulated()
    b.trace.holders.append(OUTPUTS._replace(storages=(0, 2), limit=100))
    assert not evaluation_accumulates.find(b.context())


@pytest.mark.parametrize("op", ["aten.other", "aten.op0"])
def test_says_whether_the_run_fits_with_outputs_in_host_memory(op: str) -> None:
    """With the failed one too, if the same line of the model makes it."""
    b = EvaluationBuilder(PhaseKind.FORWARD)
    for _ in range(5):
        b.call(20 * MIB)
    b.alloc(120 * MIB, op=op, line="model.py:3 forward")
    finding = only(evaluation_accumulates.find(b.context(150 * MIB)))
    assert finding.is_decisive
    assert only(evaluation_accumulates.find(b.context(110 * MIB))).is_decisive == (op == "aten.op0")
    roomy = only(evaluation_accumulates.find(b.context(250 * MIB)))
    assert not roomy.is_decisive and "fits" not in roomy.title


@pytest.mark.parametrize(
    ("is_called_after", "joined_mib", "required_mib"), [(False, 30, 20), (True, 30, 80), (False, 32, 84)]
)
def test_what_is_made_of_what_was_kept_is_in_host_memory_too(
    is_called_after: bool, joined_mib: int, required_mib: int
) -> None:
    """Five outputs of 6 MiB are joined, and memory runs out in what is computed with that; another model that is called
    there may have made it by itself, and so may what is larger. The calls need a segment of 20 MiB themselves."""
    b = accumulated(6 * MIB)
    if is_called_after:
        b.call(4 * MIB, path="other")
    b.alloc(joined_mib * MIB, op="aten.cat", line="eval.py:12 main")
    b.alloc(joined_mib * MIB, op="aten.pow", line="eval.py:13 main")
    b.trace.ended_out_of_memory = True
    finding = only([one for one in evaluation_accumulates.find(b.context(90 * MIB)) if "5 calls" in one.title])
    (needs,) = [one.required_bytes for one in finding.evidence if one.required_bytes is not None]
    assert needs == required_mib * MIB


def test_the_graphs_that_calls_keep_are_no_outputs_of_a_call_beside_them() -> None:
    """The second model is called without gradients, between calls of the first with them."""
    b = EvaluationBuilder(PhaseKind.FORWARD)
    for _ in range(5):
        made = b.call(2 * MIB, 4 * MIB, nodes=2, path="encoder")
        b.free(*b.call(MIB, path="decoder", line="eval.py:7 main"))
        b.trace.holders = [OUTPUTS._replace(storages=(made[0],), nodes=2)]
    b.trace.last_uses = [birth + 1 for birth in b.trace.lifetimes()[0]]
    context = b.context()
    assert evaluation_with_gradients.find(context) and not evaluation_accumulates.find(context)


@pytest.mark.parametrize(("line", "is_shared"), [(CALL, True), ("eval.py:6 main", False)])
def test_the_change_of_a_line_is_for_all_modules_that_it_calls(line: str, is_shared: bool) -> None:
    b = EvaluationBuilder(PhaseKind.FORWARD)
    for path, at, size in (("a", CALL, 32 * MIB), ("b", line, 64 * MIB)):
        for _ in range(5):
            b.call(MIB, size, nodes=2, path=path, line=at)
    b.trace.last_uses = [birth + 1 for birth in b.trace.lifetimes()[0]]
    b.trace.may_train = False
    findings = evaluation_with_gradients.find(b.context(300 * MIB))
    needs = [one.required_bytes for finding in findings for one in finding.evidence if one.required_bytes is not None]
    assert len(needs) == 2 and (needs[0] == needs[1]) is is_shared


@pytest.mark.parametrize("larger", [0, 1])
def test_what_several_loops_leave_is_added_up(larger: int) -> None:
    """As evaluations of several epochs do, into one list."""
    b = EvaluationBuilder(PhaseKind.FORWARD)
    for loop in range(2):
        for _ in range(5):
            b.call((4 if loop == larger else 2) * MIB)
        b.phase(PhaseKind.BACKWARD)
        b.phase(PhaseKind.FORWARD)
    finding = only(evaluation_accumulates.find(b.context()))
    assert finding.num_bytes == 30 * MIB
    assert "of 10 calls of" in finding.title and "4.00 MiB a call, 30.00 MiB in all" in finding.title


@pytest.mark.parametrize(
    ("is_freed", "title"),
    [
        (True, "of 5 calls of Net stay on the GPU: 2.00 MiB a call, 10.00"),
        (False, "of 9 calls of Net stay on the GPU: 2.00 MiB a call, 18.00"),
    ],
)
def test_calls_are_those_of_which_something_is_live_at_a_time(is_freed: bool, title: str) -> None:
    """An evaluation of five batches, whose outputs a later one of four replaces."""
    b = accumulated()
    outputs = [index for forward in b.trace.forwards for index in forward.outputs]
    b.phase(PhaseKind.BACKWARD)
    b.free(*outputs * is_freed)
    b.phase(PhaseKind.FORWARD)
    for _ in range(4):
        b.call(2 * MIB)
    finding = only(evaluation_accumulates.find(b.context()))
    assert title in finding.title and finding.num_bytes == (10 if is_freed else 18) * MIB


def test_the_edit_is_of_the_holder_with_most_a_call() -> None:
    b = EvaluationBuilder(PhaseKind.FORWARD)
    for _ in range(5):
        b.call(2 * MIB, 4 * MIB, num_outputs=2)
    b.trace.holders += [
        OUTPUTS._replace(storages=(0, 2), batches=None),
        OUTPUTS._replace(name="large", storages=(1, 3)),
    ]
    finding = only(evaluation_accumulates.find(b.context()))
    assert finding.edit is not None and finding.edit.name == "large" and finding.num_bytes == 30 * MIB
    assert ["40", "240.00 MiB"] in all_figures(finding)


@pytest.mark.parametrize("source", ["/lib/transformers/trainer.py:9 loop", r"C:\lib\transformers\trainer.py:9 loop"])
def test_a_trainer_has_options_of_its_own(source: str) -> None:
    b = accumulated()
    b.trace.holders.append(OUTPUTS._replace(storages=(0, 2), source=source))
    fix = only(evaluation_accumulates.find(b.context())).evidence[-1]
    assert all(name in fix.text for name in ("preprocess_logits_for_metrics", "eval_accumulation_steps"))


@pytest.mark.parametrize(("is_held", "is_used"), [(True, False), (False, False), (True, True)])
def test_caches_that_something_keeps_and_no_later_call_uses(is_held: bool, is_used: bool) -> None:
    b = EvaluationBuilder(PhaseKind.DECODE)
    made = []
    for _ in range(5):
        (cache, _) = b.call(2 * MIB, 4 * MIB, num_outputs=0)
        b.trace.owners[cache] = Owner(Role.KV_CACHE, "")
        made.append(cache)
    b.trace.last_uses = [NONE] * len(b.trace.storages)
    if is_used:
        b.trace.last_uses[made[0]] = b.trace.last_uses[made[1]] = b.trace.last_uses[made[2]] = len(b.trace.events)
        b.trace.last_uses[made[3]] = b.trace.last_uses[made[4]] = len(b.trace.events)
    if is_held:
        b.trace.holders.append(OUTPUTS._replace(storages=(made[0],)))
    found = evaluation_accumulates.find(b.context())
    assert bool(found) == (is_held and not is_used)
    for one in found:
        assert (
            one.title.startswith("KV caches and outputs of 5 calls")
            and "the KV cache of each call" in one.evidence[-1].text
        )


# -- evaluation-with-gradients ---------------------------------------------------------------------------------------


def with_graphs(
    num_bytes: int = 20 * MIB, number: int = 3, *, is_kept: bool = False, other_mib: int = 2, **settings: object
) -> EvaluationBuilder:
    """Calls with gradients, whose saved tensors are freed after each, or stay."""
    b = EvaluationBuilder(PhaseKind.FORWARD)
    b.free(b.alloc(other_mib * MIB))
    for step in range(number):
        output, saved = b.call(512, num_bytes, **({"nodes": 5 + step} | settings))  # type: ignore[arg-type]
        b.free(output, *[] if is_kept else [saved])
    return b


def test_graphs_that_no_backward_reaches() -> None:
    finding = only(evaluation_with_gradients.find(with_graphs().context()))
    assert (finding.severity, finding.num_bytes) == (Severity.WARNING, 20 * MIB)
    assert all_figures(finding) == [["3", "eval.py:5", "20.00 MiB"], ["7"], ["eval.py:5"]]
    assert finding.edit == Edit(EditKind.NO_GRADIENTS, CALL)
    b = with_graphs()
    b.trace.forwards[1] = b.trace.forwards[1]._replace(source=len(b.trace.sources))
    b.trace.sources.append("eval.py:6 main")
    assert "at eval.py:5 save up to" in only(evaluation_with_gradients.find(b.context())).title
    assert finding.evidence[0].source == finding.evidence[1].source == CALL


@pytest.mark.parametrize(
    ("num_freed", "calls", "num_mib", "how"),
    [
        (0, "3 calls", 60, "together"),
        (1, "2 of 3 calls", 40, "together"),
        (3, "3 calls", 20, "each"),
    ],
)
def test_calls_of_which_something_is_live_at_once(num_freed: int, calls: str, num_mib: int, how: str) -> None:
    b = EvaluationBuilder(PhaseKind.FORWARD)
    for step in range(3):
        output, saved = b.call(512, 20 * MIB, nodes=5)
        b.free(output, *[saved] * (step < num_freed))
    finding = only(evaluation_with_gradients.find(b.context()))
    assert finding.title.startswith(f"No torch.no_grad(): {calls} of Net")
    assert f"save up to {num_mib}.00 MiB of activations {how}, and" in finding.title
    assert finding.culprit is not None and finding.culprit.name == f"activations of {num_mib // 20} call" + "s" * (
        num_mib > 20
    )


@pytest.mark.parametrize(
    ("num_bytes", "other_mib", "severity"),
    [
        (64 * KIB, 0, Severity.WARNING),
        (64 * KIB - 512, 0, None),
        (4 * MIB, 80, Severity.WARNING),
        (4 * MIB, 82, Severity.NOTE),
    ],
)
def test_graphs_are_told_from_64_kib_on_and_warned_of_from_a_twentieth_of_the_peak_on(
    num_bytes: int, other_mib: int, severity: Severity | None
) -> None:
    found = evaluation_with_gradients.find(with_graphs(num_bytes, other_mib=other_mib).context())
    assert [one.severity for one in found] == ([] if severity is None else [severity])


@pytest.mark.parametrize("other", [{"nodes": 0}, {"training": True}, {"num_outputs": 2}])
def test_silent_on_calls_without_a_graph_on_training_and_on_outputs(other: dict[str, object]) -> None:
    assert not evaluation_with_gradients.find(with_graphs(**other).context())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "then", "fails", "is_told"),
    [(2, None, False, True), (1, None, False, False), (2, None, True, False), (2, PhaseKind.BACKWARD, False, False)],
)
def test_graphs_that_stay_until_the_end_are_of_two_calls_at_least(
    number: int, then: PhaseKind | None, fails: bool, is_told: bool
) -> None:
    """A program that has failed may have come to its backward."""
    b = with_graphs(number=number, is_kept=True)
    if then is not None:
        b.phase(then)
        b.alloc(512)
    b.trace.failure = object() if fails else None  # type: ignore[assignment]
    assert bool(evaluation_with_gradients.find(b.context())) == is_told


@pytest.mark.parametrize(("usable_mib", "decides"), [(150, True), (110, False), (300, False)])
def test_says_whether_the_run_fits_without_gradients(usable_mib: int, decides: bool) -> None:
    """Five calls keep 20 MiB each, and then 120 are asked for."""
    b = with_graphs(20 * MIB, 5, is_kept=True)
    b.alloc(120 * MIB)
    b.trace.last_uses = [NONE] * len(b.trace.storages)
    finding = only(evaluation_with_gradients.find(b.context(usable_mib * MIB)))
    assert finding.is_decisive == decides


def test_what_piles_up_from_call_to_call_and_why() -> None:
    def reasons(**holder: object) -> list[str]:
        b = with_graphs(number=5, is_kept=True)
        if holder:
            b.trace.holders.append(OUTPUTS._replace(storages=(2,), **holder))
        finding = only(evaluation_with_gradients.find(b.context()))
        assert ["[20971520]", "uint8", "aten.op1", "model.py:3", "20.00 MiB", "5"] in all_figures(finding)
        return [line.text for line in finding.evidence if "piles up" in line.text]

    b = with_graphs(number=5, is_kept=True)
    b.trace.holders.append(OUTPUTS._replace(storages=(2,), nodes=5))
    texts = [line.text for line in only(evaluation_with_gradients.find(b.context())).evidence]
    assert "kept by list `outputs`, filled at x/eval.py:9" in texts
    assert reasons() == ["it piles up from call to call; what keeps its graph was not seen:"]
    assert reasons(nodes=5) == ["it piles up from call to call, for the outputs are kept with their graph:"]
    assert reasons(nodes=0) == ["it piles up from call to call, kept without a graph:"]


@pytest.mark.parametrize(
    ("nodes", "num_bytes", "is_told"), [(0, 32 * KIB, True), (0, 31 * KIB, False), (5, 1024, True)]
)
def test_growth_without_a_graph_is_told_from_64_kib_a_call_on(nodes: int, num_bytes: int, is_told: bool) -> None:
    """Of two kinds of tensors that a list keeps."""
    b = EvaluationBuilder(PhaseKind.FORWARD)
    for _ in range(5):
        b.free(b.call(*[num_bytes] * 2, 20 * MIB, nodes=5, num_outputs=2)[2])
    b.trace.holders.append(OUTPUTS._replace(storages=(0, 1), nodes=nodes))
    finding = only(evaluation_with_gradients.find(b.context()))
    assert any("piles up" in line.text for line in finding.evidence) == is_told


def test_a_cache_that_keeps_the_graphs_of_all_calls() -> None:
    b = EvaluationBuilder(PhaseKind.DECODE)
    for number in range(1, 6):
        cache, _ = b.call(number * 2 * MIB, 20 * MIB, nodes=5, num_outputs=0)
        b.trace.owners[cache] = Owner(Role.KV_CACHE, "")
    finding = only(evaluation_with_gradients.find(b.context()))
    line = next(line for line in finding.evidence if "keys and values that are" in line.text)
    assert figures(line.text) == ["[10485760]", "uint8", "aten.op0", "model.py:3", "5", "30.00 MiB"]
    assert (line.num_bytes, line.shape) == (30 * MIB, (10 * MIB,))


@pytest.mark.parametrize(("joins", "kept_mib"), [(True, 140), (False, 100)])
def test_caches_of_earlier_calls_count_if_later_ones_have_made_new_ones_of_them(joins: bool, kept_mib: int) -> None:
    """Five calls keep 20 MiB each, and their caches 10: the first four are of no use without gradients."""
    b = EvaluationBuilder(PhaseKind.DECODE)
    b.trace.last_uses = []
    for _ in range(5):
        cache, _ = b.call(10 * MIB, 20 * MIB, nodes=5)
        b.trace.owners[cache] = Owner(Role.KV_CACHE, "")
    ends = [forward.end for forward in b.trace.forwards]
    b.trace.last_uses = [NONE] * len(b.trace.storages)
    for number, cache in enumerate(b.trace.owners):
        b.trace.last_uses[cache] = ends[number + 1] - 1 if joins and number < 4 else ends[number] - 1
    finding = only(evaluation_with_gradients.find(b.context()))
    assert finding.num_bytes == kept_mib * MIB


@pytest.mark.parametrize("line", ["eval.py:5 main", "loss.py:9 target"])
def test_of_calls_that_a_loss_makes_those_for_a_target_are_told_by_their_line(line: str) -> None:
    """A model in eval mode is called for what is differentiated, and for a target, whose graph is dropped."""
    b = EvaluationBuilder(PhaseKind.FORWARD)
    _, saved = b.call(512, 20 * MIB, nodes=5)
    b.free(*b.call(512, 20 * MIB, nodes=5, line=line))
    b.phase(PhaseKind.BACKWARD)
    b.free(saved)
    found = evaluation_with_gradients.find(b.context())
    assert len(found) == (line != CALL) and all("at loss.py:9 save" in one.title for one in found)


def test_calls_of_two_lines_that_no_backward_divides_are_one_loop() -> None:
    b = EvaluationBuilder(PhaseKind.FORWARD)
    for number in range(6):
        b.call(MIB, 2 * MIB, nodes=5, line=f"eval.py:{number % 2 + 1} main")
    b.phase(PhaseKind.OTHER)
    finding = only(evaluation_with_gradients.find(b.context()))
    # All six have left theirs at the peak, those of the other line as well.
    title, _, _, saved, *_ = all_figures(finding)
    assert (title[0], title[2], saved[4:]) == ("6", "12.00 MiB", ["2.00 MiB", "6"])


def test_a_line_that_trains_too_is_not_to_be_edited() -> None:
    b = with_graphs()
    b.phase(PhaseKind.BACKWARD)
    b.call(512, training=True, line="eval.py:6 main")
    assert only(evaluation_with_gradients.find(b.context())).edit is not None
    b.call(512, training=True)
    assert only(evaluation_with_gradients.find(b.context())).edit is None


# -- loops of calls --------------------------------------------------------------------------------------------------


def test_loops_are_of_one_module_without_training_between() -> None:
    b = EvaluationBuilder(PhaseKind.FORWARD)
    for phase in (None, PhaseKind.BACKWARD, PhaseKind.OPTIMIZER_STEP, PhaseKind.EVALUATION):
        if phase is not None:
            b.phase(phase)
        b.call(512)
        b.call(512, path="head")
    b.call(512, nodes=3)
    b.call(512)
    b.call(512, path="head")
    loops = calls.find_call_loops(b.trace.forwards, b.trace, lambda forward: forward.nodes == 0)
    numbers = [[b.trace.forwards.index(forward) for forward in loop] for loop in loops]
    assert numbers == [[0], [1], [2], [3], [4, 6], [5, 7, 10], [9]]
    assert calls.find_training_events(b.trace) == [
        time for time, phase in b.trace.list_phase_begins() if phase.kind.value in ("backward", "optimizer step")
    ]


def test_new_storages_are_on_the_gpu_and_have_no_role() -> None:
    b = EvaluationBuilder(PhaseKind.FORWARD)
    made = [
        b.alloc(1), b.alloc(1), b.alloc(1, device="cpu"), b.alloc(1, hidden=True), b.alloc(1, owner=(Role.BUFFER, "")),
        b.alloc(1, owner=(Role.KV_CACHE, "")), b.alloc(1), b.alloc(1),
    ]  # fmt: skip
    context = b.context()
    begin, end = context.lifetimes.births[made[1]], context.lifetimes.births[made[7]]
    assert calls.new_storages(context, begin, end) == [made[1], made[6]]
    assert calls.new_storages(context, begin, end, caches=True) == [made[5]]


def cut(number: int, *, waits: bool) -> EvaluationBuilder:
    """Calls with gradients in eval mode, and a request that ended the run, which let go of what they had saved."""
    b = EvaluationBuilder(PhaseKind.FORWARD)
    weight = b.parameter("weight", 256)
    saved = [b.call(MIB, 4 * MIB, nodes=5)[1] for _ in range(number)]
    b.alloc(512 * MIB)
    b.free(*saved)
    b.trace.ended_out_of_memory = True
    b.trace.first_steps = [FirstStep((weight,), (NONE,), (2,))] * waits
    return b


@pytest.mark.parametrize(
    ("number", "settings", "is_told"),
    [
        (7, {"waits": True}, False),  # of a loss, it may be: a backward was to come
        (8, {"waits": True}, True),
        (2, {"waits": False}, True),
    ],
)
def test_calls_that_memory_cut_may_be_of_a_loss(number: int, settings: dict[str, bool], is_told: bool) -> None:
    assert bool(evaluation_with_gradients.find(cut(number, **settings).context(256 * MIB))) == is_told


@pytest.mark.parametrize(("line", "is_told"), [(CALL, False), ("eval.py:9 main", True)])
def test_calls_of_a_line_that_a_backward_used_in_an_earlier_step_are_of_a_loss(line: str, is_told: bool) -> None:
    b = EvaluationBuilder(PhaseKind.FORWARD)
    trained = b.call(MIB, 4 * MIB, nodes=5)[1]
    b.phase(PhaseKind.BACKWARD)
    b.free(trained)
    b.phase(PhaseKind.FORWARD)
    saved = [b.call(MIB, 4 * MIB, nodes=5, line=line)[1] for _ in range(2)]
    b.alloc(512 * MIB)
    b.free(*saved)
    b.trace.ended_out_of_memory = True
    assert bool(evaluation_with_gradients.find(b.context(256 * MIB))) == is_told


@pytest.mark.parametrize("training", [False, True])
def test_the_call_that_memory_ended_is_told_where_the_program_does_not_train(training: bool) -> None:
    """It has saved 300 MiB and its result is not there yet; after the last uses, 40 MiB are alive."""
    b = EvaluationBuilder(PhaseKind.FORWARD)
    b.call(*[100 * MIB] * 3, nodes=5, training=training)
    failed = b.trace.forwards.pop()._replace(outputs=())
    b.alloc(40 * MIB)
    b.trace.ended_out_of_memory, b.trace.failed_forward = True, failed
    b.trace.last_uses = [3, 4, 5, NONE]
    assert not evaluation_with_gradients.find(b.context(320 * MIB))
    b.trace.may_train = False
    finding = only(evaluation_with_gradients.find(b.context(320 * MIB)))
    assert finding.num_bytes == 300 * MIB and finding.is_decisive
    assert ("eval mode" in finding.title) == (not training) and "1 call of Net" in finding.title
    b.trace.forwards.append(failed._replace(begin=0, end=0))  # in training mode, in a program that does not train
    assert only(evaluation_with_gradients.find(b.context(320 * MIB))).edit is not None


@pytest.mark.parametrize("nodes", [0, 5])
def test_what_calls_keep_is_told_where_the_next_call_fills_the_gpu(nodes: int) -> None:
    """That call has not come to what the program keeps of its result."""
    b = EvaluationBuilder(PhaseKind.FORWARD)
    made = [b.call(10 * MIB, nodes=nodes, num_outputs=1 - min(nodes, 1))[0] for _ in range(5)]
    b.trace.holders.append(OUTPUTS._replace(storages=tuple(made[:3]), nodes=nodes))
    b.enter("", "Net")
    begin = len(b.trace.events)
    b.alloc(40 * MIB, op="aten.mm")
    call = b.trace.forwards[-1]
    b.trace.failed_forward = call._replace(begin=begin, end=len(b.trace.events), outputs=())
    b.trace.ended_out_of_memory, b.trace.may_train = True, False
    rule = evaluation_with_gradients.find if nodes else evaluation_accumulates.find
    finding = only(rule(b.context(64 * MIB)))
    assert finding.title.startswith("No torch.no_grad(): 6 calls" if nodes else "Outputs of 5 calls of Net")
    assert "kept by list `outputs`" in finding.title


# -- an evaluation that memory cuts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        ({}, True),
        ({"line": CALL}, False),  # the line that has trained it, left in eval mode
        ({"line": CALL, "caller": "eval.py:9 validate"}, True),  # a method of the model, which the evaluation calls
        ({"line": CALL, "caller": "eval.py:9 test"}, False),  # not of the function that has called eval()
        ({"switched": False}, False),
        ({"stepped": False}, False),
        ({"training": True}, False),
        ({"other": True}, False),  # a model that was never trained: of a perceptual loss
    ],
)
def test_the_first_call_of_an_evaluation_after_training(change: dict[str, object], is_told: bool) -> None:
    """A model is trained, switched to eval mode, and memory runs out in its next call, which makes autograd nodes."""
    settings = {"line": "eval.py:9 validate", "switched": True, "stepped": True, "training": False, "other": False}
    settings["caller"] = "train.py:1 main"
    settings |= change
    b = EvaluationBuilder()
    b.trace.may_train = b.trace.ended_out_of_memory = True
    b.phase(PhaseKind.FORWARD)
    b.free(*b.call(2 * MIB, 20 * MIB, nodes=9, training=True, path="other" if settings["other"] else ""))
    b.phase(PhaseKind.BACKWARD)
    if settings["stepped"]:
        b.phase(PhaseKind.OPTIMIZER_STEP)
    b.phase(PhaseKind.OTHER)
    module = b._index(b.trace.modules, b.trace.modules[0]._replace(path=""))
    if settings["switched"]:
        line = b._index(b.trace.sources, "eval.py:7 validate")
        b.trace.eval_calls.append(EvalCall(len(b.trace.events), module, line))
    b.call(2 * MIB, 20 * MIB, 20 * MIB, nodes=9, training=bool(settings["training"]), line=str(settings["line"]))
    trained, caller = (b._index(b.trace.sources, line) for line in ("train.py:1 main", str(settings["caller"])))
    b.trace.forwards[0] = b.trace.forwards[0]._replace(caller=trained)
    b.trace.failed_forward = b.trace.forwards.pop()._replace(outputs=(), caller=caller)
    b.trace.last_uses = [NONE] * len(b.trace.storages)
    assert bool(evaluation_with_gradients.find(b.context(40 * MIB))) == is_told


def test_what_parts_of_a_model_are_called_beside_is_told_once() -> None:
    """A method of the model calls its parts; a list keeps what it returns."""
    b = EvaluationBuilder(PhaseKind.FORWARD)
    for _ in range(5):
        for path in ("embed", "head"):
            b.free(*b.call(MIB, path=path))
        b.alloc(4 * MIB, line="model.py:9 step")
    b.trace.holders.append(OUTPUTS._replace(storages=(2, 5)))
    only(evaluation_accumulates.find(b.context()))


@pytest.mark.parametrize(("fills", "words"), [(True, "keep of each batch only"), (False, "move this to host memory")])
def test_what_another_object_keeps_is_moved_before_it_is_given(fills: bool, words: str) -> None:
    b = accumulated()
    b.trace.holders.append(OUTPUTS._replace(storages=(0, 2), fills=fills))
    fix = only(evaluation_accumulates.find(b.context())).evidence[-1]
    assert words in fix.text


@pytest.mark.parametrize(
    ("places", "sizes"),
    [("aaabbb", [3, 3]), ("aabb", [2, 2]), ("aaab", [4]), ("ababab", [6]), ("aabbaa", [6]), ("aaaa", [4])],
)
def test_what_one_place_calls_before_another_is_a_loop_of_its_own(places: str, sizes: list[int]) -> None:
    """As a validation before a test, both with one method that calls the model."""
    b = EvaluationBuilder(PhaseKind.FORWARD)
    for place in places:
        b.call(MIB)
        b.trace.forwards[-1] = b.trace.forwards[-1]._replace(caller=ord(place))
    loops = calls.find_call_loops(b.trace.forwards, b.trace, lambda forward: True)
    assert [len(loop) for loop in loops] == sizes
