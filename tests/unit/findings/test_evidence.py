"""What rules share: words, the fixes that a run could still apply, evidence of tensors, and facts of a trace."""

from __future__ import annotations

import dataclasses

import pytest

from memprof.findings import evidence
from memprof.findings.effect import compute_needs_without, effect_evidence, is_decisive
from memprof.findings.evidence import (
    find_feature_map_sizes,
    find_half,
    find_input_shapes,
    is_applicable,
    is_forward,
    is_inference,
    is_peak_in_evaluation,
    percent,
    suggest_fixes,
    tensors_evidence,
    vocab_size_of,
    vocabulary_tables,
)
from memprof.findings.finding import Context, Finding, Severity
from memprof.fixes.catalog import FIXES
from memprof.spec import Mode, TargetSpec
from memprof.trace.events import NONE, Caller, EvalCall, Forward, ModuleRole, PhaseKind
from memprof.units import MIB
from tests.unit.findings.figures import figures
from tests.unit.traces import TraceBuilder

# -- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0%"), (1, "less than 1%"), (199, "less than 1%"), (200, "1%"), (299, "1%"), (301, "2%"), (20000, "100%")],
)
def test_a_share_below_one_percent_is_no_zero(num_bytes: int, text: str) -> None:
    assert percent(num_bytes, 20000) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 tensors"), (1, "1 tensor"), (2, "2 tensors")])
def test_one_is_singular(count: int, text: str) -> None:
    assert evidence.plural(count, "tensor") == text


def test_a_shape_and_a_line() -> None:
    assert evidence.format_shape((2, 30)) == "[2 x 30]" and evidence.format_shape(()) == "[]"
    assert evidence.file_and_line("/a/b/train.py:12 main") == "b/train.py:12"
    assert evidence.file_and_line(None) == "an unknown line"


def test_findings_are_in_the_order_of_severity_and_then_of_bytes() -> None:
    findings = [
        Finding(str(number), severity, "", num_bytes, (), (), is_decisive=decisive)
        for number, (severity, num_bytes, decisive) in enumerate(
            [
                (Severity.NOTE, 1, True),
                (Severity.ERROR, None, False),
                (Severity.WARNING, 9, False),
                (Severity.WARNING, 5, False),
                (Severity.WARNING, None, False),
                (Severity.NOTE, 99, False),
            ]
        )
    ]
    mixed = findings[3:] + findings[:3]
    assert sorted(mixed, key=lambda one: one.order) == findings


# -- fixes -----------------------------------------------------------------------------------------------------------

SPEC = TargetSpec(model="x", batch_size=2)


def trained(dtype: str = "float32") -> TraceBuilder:
    b = TraceBuilder()
    b.parameter("weight", 16, 16, dtype=dtype)
    b.phase(PhaseKind.FORWARD)
    b.phase(PhaseKind.BACKWARD)
    return b


@pytest.mark.parametrize(
    ("fix", "known", "expected"),
    [
        ("chunked-loss", {}, True),
        ("chunked-loss", {"fixes": ("chunked-loss",)}, False),
        ("chunked-loss", {"fixes": ("chunked-loss=64",)}, False),
        ("chunked-loss", {"spec": SPEC.edit(fixes=("chunked-loss",))}, False),
        ("chunked-loss", {"spec": SPEC.edit(mode=Mode.INFERENCE)}, False),
        ("micro-batch", {"fixes": ("optimizer-in-backward",)}, False),
        ("optimizer-in-backward", {"fixes": ("micro-batch",)}, False),
        ("low-rank-npt", {}, False),
        ("low-rank-npt", {"spec": SPEC}, False),
        ("low-rank-npt", {"spec": SPEC.edit(npt="dense")}, True),
    ],
)
def test_a_fix_can_still_be_applied(fix: str, known: dict[str, object], expected: bool) -> None:
    assert is_applicable(trained().context(**known), FIXES[fix]) is expected


def test_a_fix_suits_the_run() -> None:
    half = trained("bfloat16").context()
    assert is_applicable(trained().context(), FIXES["bfloat16"]) and not is_applicable(half, FIXES["bfloat16"])
    assert is_applicable(half, FIXES["chunked-loss"])
    by_hand = trained()
    by_hand.trace.updates_parameters_manually = True
    assert not is_applicable(by_hand.context(), FIXES["fused-optimizer"])
    assert is_applicable(by_hand.context(), FIXES["chunked-loss"])
    compiled = trained()
    compiled.trace.compiling = object()  # type: ignore[assignment]
    assert not is_applicable(compiled.context(), FIXES["compile"])
    assert is_applicable(trained().context(), FIXES["compile"])
    forward_only = TraceBuilder(PhaseKind.FORWARD)
    forward_only.alloc(1)
    assert not is_applicable(forward_only.context(), FIXES["chunked-loss"])


def test_fixes_of_a_problem_are_those_that_can_be_applied() -> None:
    names = suggest_fixes(trained().context(), "fragmentation")
    assert names == ("expandable-segments",)
    assert suggest_fixes(trained().context(fixes=names), "fragmentation") == ()


@pytest.mark.parametrize(
    ("kinds", "ended", "num_calls", "trains", "expected"),
    [
        ((PhaseKind.FORWARD,), False, 0, False, True),
        ((PhaseKind.MODEL,), False, 0, False, False),
        ((PhaseKind.FORWARD, PhaseKind.BACKWARD), False, 0, False, False),
        ((PhaseKind.FORWARD, PhaseKind.OPTIMIZER_STEP), False, 0, False, False),
        ((PhaseKind.FORWARD,), True, 0, False, False),
        ((PhaseKind.FORWARD,), True, 1, False, True),
        ((PhaseKind.FORWARD,), True, 1, True, False),
    ],
)
def test_a_run_infers_if_it_goes_forward_only(
    kinds: tuple[PhaseKind, ...], ended: bool, num_calls: int, trains: bool, expected: bool
) -> None:
    """Where memory has run out, a call without gradients is known to be no training."""
    b = TraceBuilder(None)
    for kind in kinds:
        b.phase(kind)
    b.trace.ended_out_of_memory, b.trace.trains = ended, trains
    b.trace.forwards = [Forward(0, 1, 0, NONE, trains, 0, ())] * num_calls
    assert is_inference(b.trace) is expected
    b.trace.failed_forward = b.trace.forwards.pop() if num_calls else None  # the call in which memory ran out
    assert is_inference(b.trace) is expected


@pytest.mark.parametrize(("nodes", "may_train", "expected"), [(0, True, True), (1, False, True), (1, True, False)])
def test_an_input_may_be_trained_through_a_frozen_model(nodes: int, may_train: bool, expected: bool) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.trace.ended_out_of_memory, b.trace.may_train = True, may_train
    b.trace.forwards = [Forward(0, 1, 0, NONE, False, nodes, ())]
    assert is_inference(b.trace) is expected


# -- evidence --------------------------------------------------------------------------------------------------------


def test_callers_follow_the_line_that_is_named_once() -> None:
    """model.py:1 is not model.py:12."""
    b = TraceBuilder()
    b.enter("layers.3.mlp")
    index = b.new(4, 2, dtype="bfloat16", op="aten.gelu", line="model.py:1 forward")
    b.trace.sources.append("train.py:5 main")
    b.trace.callers = [Caller(index, 1, "torch.func.vmap"), Caller(index, 1, "")]
    found = evidence.tensor_evidence(b.trace, index, "model.py:12, model.py:1, model.py:1")
    called = ", called by torch.func.vmap at train.py:5, called at train.py:5"
    assert found.text == f"model.py:12, model.py:1{called}, model.py:1"
    assert (found.num_bytes, found.shape, found.dtype, found.module) == (16, (4, 2), "bfloat16", "layers.*.mlp")
    assert (found.op, found.source, found.device) == ("aten.gelu", "model.py:1 forward", "cuda:0")
    assert evidence.tensor_evidence(b.trace, index, "", num_bytes=7).num_bytes == 7


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (2 * MIB,)},
        {"dtype": "int64"},
        {"op": "aten.mul"},
        {"line": "a.py:9 f"},
        {"path": "net"},
        {"by": "vmap"},
    ],
)
def test_tensors_that_are_not_equal_have_a_line_each(change: dict[str, object]) -> None:
    b = TraceBuilder()

    def make(shape: tuple[int, ...] = (MIB,), path: str = "layers.1", by: str = "", **more: object) -> int:
        b.enter(path)
        index = b.new(*shape, **more)
        b.leave()
        if by:
            b.trace.callers.append(Caller(index, 0, by))
        return index

    same, other = [make(), make(path="layers.2")], make(**change)
    lines = tensors_evidence(b.context(), [*same, other], 6, lambda index: "tensor")
    assert len(lines) == 2
    assert len(tensors_evidence(b.context(), same, 6, lambda index: "tensor")) == 1
    assert len(tensors_evidence(b.context(), same, 6, str)) == 2


def test_tensors_with_the_most_live_bytes_come_first() -> None:
    """At event 4, two of 2 MiB are live, of which one is freed, and one of 3; later, at the peak, one of each."""
    b = TraceBuilder()
    small = [b.alloc(2 * MIB, op="aten.a") for _ in range(2)]
    large = b.alloc(3 * MIB, op="aten.b")
    late = b.alloc(MIB, op="aten.c")
    b.free(small[0], late)
    b.alloc(100 * MIB)
    context = b.context()
    lines = tensors_evidence(context, [late, large, *small], 3, lambda index: "tensor")
    assert [(line.op, line.num_bytes) for line in lines] == [
        ("aten.a", 2 * MIB),
        ("aten.b", 3 * MIB),
        ("aten.c", MIB),
    ]
    ends = [line.text.partition("; ")[2] for line in lines]
    assert ends == ["2 live then, 1 at the peak", "1 live then and at the peak", "none live then and at the peak"]
    lines = tensors_evidence(context, [late, large, *small], context.ledger.peak_event, lambda index: "tensor")
    assert [line.text.partition("; ")[2] for line in lines] == [
        "1 live at the peak",
        "1 live at the peak",
        "none live at the peak",
    ]
    (line,) = tensors_evidence(context, [late], 4, lambda index: "tensor")
    assert line.text.endswith("; 1 live then, none at the peak")


# -- facts of the trace ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "forward_event", "in_module", "line", "expected"),
    [
        (PhaseKind.FORWARD, 3, False, None, True),
        (PhaseKind.MODEL, NONE, True, "a.py:1 f", False),
        (PhaseKind.BACKWARD, NONE, True, "a.py:1 f", True),  # a layer that runs again
        (PhaseKind.BACKWARD, 0, True, "a.py:1 f", False),
        (PhaseKind.BACKWARD, NONE, False, "a.py:1 f", False),
        (PhaseKind.BACKWARD, NONE, True, None, False),
    ],
)
def test_forward_code_runs_in_a_forward_or_again(
    phase: PhaseKind, forward_event: int, in_module: bool, line: str | None, expected: bool
) -> None:
    b = TraceBuilder(phase)
    if in_module:
        b.enter("net")
    index = b.new(1, line=line, forward_event=forward_event)
    assert is_forward(b.trace, b.trace.storages[index]) is expected


@pytest.mark.parametrize(
    ("parameters", "spec_dtype", "expected"),
    [
        ((("bfloat16", 4), ("float32", 1)), None, "bfloat16"),
        ((("float16", 4), ("float32", 3)), None, None),  # 8 and 12 bytes
        ((("float32", 4),), "bfloat16", None),
        ((), "bfloat16", "bfloat16"),
        ((), "float32", None),
        ((), None, None),
    ],
)
def test_half_precision_is_that_of_most_bytes(
    parameters: tuple[tuple[str, int], ...], spec_dtype: str | None, expected: str | None
) -> None:
    b = TraceBuilder()
    for dtype, elements in parameters:
        b.parameter("weight", elements * 1024, dtype=dtype)
    b.alloc(1)
    spec = None if spec_dtype is None else TargetSpec(model="x", dtype=spec_dtype)
    assert find_half(b.context(spec=spec)) == expected


def test_a_model_that_was_cast_has_the_dtype_of_its_parameters_at_the_peak() -> None:
    b = TraceBuilder()
    before = b.parameter("weight", 1024)
    b.parameter("weight", 1024, dtype="bfloat16")
    b.free(before)
    b.alloc(MIB)
    assert find_half(b.context()) == "bfloat16"


@pytest.mark.parametrize(
    ("name", "shape", "is_table"),
    [
        ("embed_tokens.weight", (1000, 64), True),
        ("model.Embedding.weight", (1000, 64), True),
        ("transformer.wte.weight", (1000, 64), True),
        ("shared.weight", (1000, 64), True),
        ("lm_head.weight", (1000, 64), True),
        ("head.weight", (1000, 64), True),
        ("output.weight", (1000, 64), True),
        ("decoder.output_projection.weight", (1000, 64), True),
        ("unembed.weight", (1000, 64), True),
        ("my_head.bias", (1000, 64), False),
        ("layers.0.head.weight", (1000, 64), False),
        ("3.head.weight", (1000, 64), True),  # of a numbered module itself
        ("embed.weight", (1000,), False),
        ("embed.weight", (1000, 64, 2), False),
        ("embed.pos.weight", (1000, 64), False),
        ("embed.pe.weight", (1000, 64), False),
        ("wpe_embed.weight", (1000, 64), False),
        ("token_type_embeddings.weight", (1000, 64), False),
        ("patch_embed.weight", (1000, 64), False),
        ("plain.weight", (1000, 64), False),
        ("own.weight", (1000, 64), True),  # an embedding by its module
        ("classifier.weight", (1000, 64), True),  # a head
    ],
)
def test_tables_of_words_by_name_or_module(name: str, shape: tuple[int, ...], is_table: bool) -> None:
    b = TraceBuilder()
    for path, role in (("own", ModuleRole.EMBEDDING), ("classifier", ModuleRole.HEAD), ("plain", ModuleRole.OTHER)):
        b.enter(path, role=role)
        b.leave()
    index = b.parameter(name, *shape)
    assert vocabulary_tables(b.trace) == ({index: name} if is_table else {})


@pytest.mark.parametrize(
    ("op", "dtype", "shape", "has_tokens"),
    [
        ("aten.embedding", "float32", (8,), True),
        ("aten.randint", "int64", (2, 8), True),
        ("aten.randint", "int32", (2, 8), True),
        ("aten.randint", "int64", (8,), False),
        ("aten.randn", "float32", (2, 8), False),
    ],
)
def test_a_model_without_tokens_has_no_table(op: str, dtype: str, shape: tuple[int, ...], has_tokens: bool) -> None:
    b = TraceBuilder()
    b.parameter("embed.weight", 1000, 64)
    b.new(*shape, op=op, dtype=dtype)
    assert bool(vocabulary_tables(b.trace)) == has_tokens


def test_the_size_of_the_vocabulary() -> None:
    b = TraceBuilder()
    b.parameter("embed.weight", 1000, 64)
    b.parameter("head.weight", 1008, 64)
    b.new(2, 8, dtype="int64")
    assert vocab_size_of(b.context()) == 1008 and vocab_size_of(b.context(vocab_size=5)) == 5
    b = TraceBuilder(PhaseKind.FORWARD)
    b.new(8, 21, op="aten._log_softmax")
    assert vocab_size_of(b.context()) == 21


@pytest.mark.parametrize(
    ("shape", "dtype", "inputs"),
    [
        ((2, 8), "int64", {(2, 8)}),
        ((2, 8), "int32", {(2, 8)}),
        ((2, 8, 64), "float32", {(2, 8)}),
        ((2, 64), "float32", {(2,)}),
        ((2, 3, 8, 8), "float32", set()),  # images
        ((2, 8), "bool", set()),
        ((64,), "float32", set()),
    ],
)
def test_shapes_of_inputs_without_features(shape: tuple[int, ...], dtype: str, inputs: set[tuple[int, ...]]) -> None:
    b = TraceBuilder()
    b.phase(PhaseKind.INPUTS)
    b.new(*shape, dtype=dtype)
    b.phase(PhaseKind.FORWARD)
    b.new(5, 5)
    assert find_input_shapes(b.context()) == inputs
    b.new(3, 7, 64, op="aten.embedding")
    assert find_input_shapes(b.context(spec=SPEC, context_length=16)) == inputs | {(3, 7), (2, 16)}
    assert find_input_shapes(b.context(context_length=16)) == inputs | {(3, 7)}


def test_feature_maps_are_results_of_convolutions() -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    for op, shape in (
        ("aten.convolution", (2, 8, 30, 40)), ("aten.conv2d", (2, 8, 15, 20)), ("aten.mul", (2, 8, 5, 6)),
        ("aten.convolution", (8, 7, 9)),
    ):  # fmt: skip
        b.new(*shape, op=op)
    assert find_feature_map_sizes(b.trace) == {(30, 40), (15, 20)}


# -- effect ----------------------------------------------------------------------------------------------------------


def kept_until_the_end(usable_mib: int | None, last_use: int = 2) -> Context:
    """100 MiB, last used before 60 are allocated, or after; these are never used; 200 MiB come then."""
    b = TraceBuilder()
    b.alloc(100 * MIB)
    b.alloc(60 * MIB)
    b.alloc(200 * MIB)
    b.trace.last_uses = [last_use, NONE, 4]
    return b.context(None if usable_mib is None else usable_mib * MIB)


@pytest.mark.parametrize(("last_use", "needed"), [(2, "300.00 MiB"), (3, "360.00 MiB")])
def test_what_a_run_needs_if_tensors_are_freed_after_their_last_use(last_use: int, needed: str) -> None:
    """The 60 MiB are taken from the segment of 100, if that is free, which is too small for 200."""
    context = kept_until_the_end(400, last_use)
    needs = compute_needs_without(context, [0, 1])
    assert needs.allocated_bytes == 200 * MIB
    line = effect_evidence(context, needs)
    assert figures(line.text) == ["200.00 MiB", "360.00 MiB", needed, "360.00 MiB"]
    assert line.num_bytes == (60 * MIB if last_use == 2 else 0)
    assert not is_decisive(context, needs)


@pytest.mark.parametrize(("usable_mib", "decides"), [(359, True), (200, True), (198, False), (360, False)])
def test_it_decides_where_the_run_fits_without_it_alone(usable_mib: int, decides: bool) -> None:
    context = kept_until_the_end(usable_mib)
    assert is_decisive(context, compute_needs_without(context, [0, 1])) == decides
    assert not is_decisive(context, None)


def test_what_was_never_used_is_freed_as_it_is_allocated_where_uses_are_not_known() -> None:
    context = kept_until_the_end(None)
    unknown = dataclasses.replace(context.ledger.trace, last_uses=[])
    context = Context(dataclasses.replace(context.ledger, trace=unknown), None)
    assert compute_needs_without(context, [0, 1, 2]).allocated_bytes == 200 * MIB


@pytest.mark.parametrize(
    ("before", "is_evaluation"),
    [
        ([PhaseKind.EVALUATION], True),
        ([PhaseKind.EVALUATION, PhaseKind.OTHER], False),
        ([PhaseKind.FORWARD, "eval"], True),
        ([PhaseKind.FORWARD, "eval", PhaseKind.OTHER], True),
        (["eval", PhaseKind.FORWARD], False),
        (["eval", PhaseKind.BACKWARD, PhaseKind.OTHER], False),
        ([PhaseKind.FORWARD, "eval", PhaseKind.OPTIMIZER_STEP], False),
        (["eval"], False),  # of a run that has not trained
        ([PhaseKind.FORWARD], False),
    ],
)
def test_a_peak_is_in_an_evaluation_from_eval_on_until_training_goes_on(
    before: list[PhaseKind | str], is_evaluation: bool
) -> None:
    b = TraceBuilder(PhaseKind.MODEL)
    for one in before:
        if isinstance(one, PhaseKind):
            b.phase(one)
        else:
            b.trace.eval_calls.append(EvalCall(len(b.trace.events), 0, 0))
    b.alloc(MIB)
    assert is_peak_in_evaluation(b.context()) is is_evaluation
