"""The facts that a finding shows, in traces whose bytes are counted by hand: in its title, and in each of its lines."""

from __future__ import annotations

import pytest

from memprof.findings import (
    Finding,
    Severity,
    attention_scores,
    compiled_saved_tensors,
    does_not_fit,
    graph_breaks,
    logits,
    optimizer_state,
    out_of_memory_caught,
    positions,
    unattributed,
    upcast,
    vocabulary,
    weight_delta,
)
from memprof.findings.suggestions import list_fix_names
from memprof.trace.events import CompiledSavedTensors, GraphBreak, ModuleRole, PhaseKind, Role
from memprof.units import GIB, MIB
from tests.unit.findings.figures import all_figures
from tests.unit.findings.language_models import training
from tests.unit.findings.test_attention_scores import TestAttentionScores
from tests.unit.traces import TraceBuilder

MILLION = MIB // 4  # elements of float32 in a MiB


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


# -- does-not-fit ----------------------------------------------------------------------------------------------------


def too_large() -> TraceBuilder:
    """100 + 50 MiB are there; of 300 that were freed, 200 are used again; then 400 are asked for, and 8 more."""
    b = TraceBuilder()
    b.parameter("weight", 100 * MILLION)
    b.phase(PhaseKind.INPUTS, 2)
    b.alloc(50 * MIB)
    b.phase(PhaseKind.FORWARD, 2)
    b.free(b.alloc(300 * MIB))
    b.enter("layers.3", "Layer", ModuleRole.LAYER)
    b.new(60 * MILLION, line="model.py:2 forward")
    b.new(60 * MILLION, line="model.py:2 forward")
    b.new(40 * MIB // 2, 2, dtype="bfloat16", line="model.py:3 forward")
    b.alloc(900 * MIB, device="cpu")
    b.new(400, MILLION, op="aten.gelu", line="model.py:4 forward")
    b.leave()
    b.phase(PhaseKind.BACKWARD, 2)
    b.new(8 * MILLION)
    return b


def test_a_failed_allocation_with_what_is_in_use_cached_and_free() -> None:
    finding = only(does_not_fit.find(too_large().context(500 * MIB, gpu="an H100")))
    assert (finding.severity, finding.num_bytes) == (Severity.ERROR, 350 * MIB)
    title, failed, usage, whole, *rest = all_figures(finding)
    assert title == ["3", "2", "400.00 MiB", "850.00 MiB", "350.00 MiB", "500.00 MiB"]
    assert failed == ["3", "2", "400.00 MiB", "[400 x 262144]", "float32", "aten.gelu", "model.py:4"]
    assert usage == ["350.00 MiB", "500.00 MiB", "100.00 MiB", "50.00 MiB"]
    assert whole == ["850.00 MiB", "3", "2", "758.00 MiB", "2"]
    assert rest == [
        ["600.00 MiB", "79%"],
        ["100.00 MiB", "13%"],
        ["50.00 MiB", "7%"],
        ["2", "60.00 MiB", "[15728640]", "float32", "aten.mm", "model.py:2"],
        ["100.00 MiB", "[26214400]", "float32", "aten.empty", "model.py:1"],
        ["80.00 MiB", "[20971520 x 2]", "bfloat16", "aten.mm", "model.py:3"],
    ]
    texts = [line.text for line in finding.evidence]
    assert [text.partition(":")[0] for text in texts[3:6]] == ["activations", "parameters", "inputs"]
    assert "of activations" in texts[6] and "of parameters" in texts[7]
    assert [line.num_bytes for line in finding.evidence] == [
        mib * MIB for mib in (400, 350, 850, 600, 100, 50, 120, 100, 80)
    ]
    assert "an H100 is full in layer 3 of step 2" in finding.title and "at least" not in finding.title
    assert "the whole run" in texts[2] and "backward of step 2" in texts[2]


def test_what_a_run_needs_at_least_that_ended_there() -> None:
    b = too_large()
    b.trace.ended_out_of_memory = True
    finding = only(does_not_fit.find(b.context(500 * MIB)))
    assert "the GPU is full" in finding.title and "at least 850.00 MiB" in finding.title
    assert "until then reserves 850.00 MiB" in finding.evidence[2].text


def test_what_is_short_by_a_few_bytes_and_fits_in_a_replay_is_short_by_none() -> None:
    """Without 80 MiB that are cached as 200 are asked for, the run reserves no more than there is."""
    b = TraceBuilder(PhaseKind.FORWARD)
    first = b.alloc(100 * MIB)
    b.alloc(100 * MIB)
    b.free(first)
    b.alloc(20 * MIB)
    b.alloc(200 * MIB)
    finding = only(does_not_fit.find(b.context(320 * MIB)))
    assert finding.num_bytes == 400 * MIB - 320 * MIB


@pytest.mark.parametrize(
    "change",
    [{"dtype": "int8"}, {"shape": (60, MIB)}, {"op": "aten.bmm"}, {"line": "model.py:9 f"}, {"owner": True}],
)
def test_tensors_that_differ_are_listed_apart(change: dict[str, object]) -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    own: dict[str, object] = {"dtype": "uint8", "op": "aten.mm", "line": "model.py:1 f", "shape": (60 * MIB,)}
    for settings in (own, own | change):
        shape = settings.pop("shape")
        owner = (Role.PARAMETER, "weight") if settings.pop("owner", False) else None
        b.new(*shape, owner=owner, **settings)
    b.alloc(300 * MIB)
    finding = only(does_not_fit.find(b.context(400 * MIB)))
    assert [line.num_bytes for line in finding.evidence if line.text.startswith("in use")] == [60 * MIB] * 2


# -- logits and scores -----------------------------------------------------------------------------------------------

WORDS = 65536


def with_logits() -> TraceBuilder:
    b = TraceBuilder()
    b.parameter("embed.weight", WORDS, 1024, dtype="bfloat16")
    b.inputs(2, 4096)
    return b


def test_copies_of_logits_where_most_are_live_and_at_the_peak() -> None:
    """1 + 2 + 2 GiB, and later 3 of other tensors beside 1 + 2, the table of 128 MiB and 64 KiB of token ids."""
    b = with_logits()
    b.enter("lm_head", "Linear", ModuleRole.HEAD)
    b.new(2, 4096, WORDS, dtype="bfloat16", line="model.py:30 forward")
    b.leave()
    upcast = b.new(2, 4096, WORDS, op="aten._to_copy", line="loss.py:5 loss")
    b.new(2, 4096, WORDS, op="aten._log_softmax", line="loss.py:6 loss")
    b.phase(PhaseKind.BACKWARD)
    b.free(upcast)
    b.alloc(3 * GIB)
    finding = only(logits.find(b.context()))
    assert (finding.severity, finding.num_bytes) == (Severity.WARNING, 5 * GIB)
    assert all_figures(finding) == [
        ["5.00 GiB", "82%", "3.00 GiB", "float32", "[8192 x 65536]", "model.py:30", "loss.py:6"],
        ["float32", "[2 x 4096 x 65536]", "float32", "2.00 GiB", "aten._to_copy", "loss.py:5", "1"],
        ["[2 x 4096 x 65536]", "float32", "2.00 GiB", "aten._log_softmax", "loss.py:6", "1"],
        ["[2 x 4096 x 65536]", "bfloat16", "1.00 GiB", "aten.mm", "model.py:30", "1"],
        ["2", "3.00 GiB", "49%", "3.13 GiB"],
    ]
    assert finding.evidence[-1].num_bytes == 3 * GIB


@pytest.mark.parametrize(
    ("ops", "kinds"),
    [
        (("mm", "_to_copy", "_softmax", "div"), "logits, float32 upcast, softmax and div of the logits of"),
        (
            ("mm", "mm", "_to_copy", "_softmax", "div", "exp"),
            "logits (2 times), float32 upcast, softmax and 2 others of",
        ),
    ],
)
def test_a_title_names_four_kinds_of_logits_or_three_and_the_number_of_others(ops: tuple[str, ...], kinds: str) -> None:
    b = TraceBuilder()
    b.parameter("embedding.weight", WORDS, 64)
    b.phase(PhaseKind.FORWARD)
    for op in ops:
        b.new(8192, WORDS, op=f"aten.{op}")
    finding = only(logits.find(b.context(vocab_size=WORDS)))
    assert f"): {kinds} [8192 x {WORDS}]" in finding.title


@pytest.mark.parametrize(("is_at_peak", "text"), [(True, "94% of the peak)"), (False, "size; none live at the peak)")])
def test_logits_that_are_at_the_peak_or_gone(is_at_peak: bool, text: str) -> None:
    b = with_logits()
    made = b.new(8192, WORDS)
    if not is_at_peak:
        b.free(made)
        b.alloc(3 * GIB)
    finding = only(logits.find(b.context()))
    assert all_figures(finding)[0][:2] == ["2.00 GiB", "94%" if is_at_peak else "64%"]
    assert text in finding.title


@pytest.mark.parametrize(
    ("phase", "op", "dtype", "label"),
    [
        (PhaseKind.FORWARD, "aten.mm", "float32", "logits"),
        (PhaseKind.FORWARD, "aten.addmm", "float32", "logits"),
        (PhaseKind.FORWARD, "aten.bmm", "float32", "logits"),
        (PhaseKind.FORWARD, "aten.baddbmm", "float32", "logits"),
        (PhaseKind.FORWARD, "aten.linear", "float32", "logits"),
        (PhaseKind.FORWARD, "aten.matmul", "float32", "logits"),
        (PhaseKind.FORWARD, "aten._log_softmax", "float32", "log-softmax"),
        (PhaseKind.FORWARD, "aten._softmax", "float32", "softmax"),
        (PhaseKind.FORWARD, "aten._to_copy", "float32", "float32 upcast"),
        (PhaseKind.FORWARD, "aten._to_copy", "float16", "cast to float16"),
        (PhaseKind.FORWARD, "aten.clone", "float32", "contiguous copy of the logits"),
        (PhaseKind.FORWARD, "aten.copy", "float32", "contiguous copy of the logits"),
        (PhaseKind.FORWARD, "aten.contiguous", "float32", "contiguous copy of the logits"),
        (PhaseKind.FORWARD, "aten.constant_pad_nd", "float32", "contiguous copy of the logits"),
        (PhaseKind.FORWARD, "aten.slice_copy", "float32", "contiguous copy of the logits"),
        (PhaseKind.FORWARD, "aten.div", "float32", "div of the logits"),
        (PhaseKind.BACKWARD, "aten.nll_loss_backward", "float32", "gradient of the log-softmax"),
        (PhaseKind.BACKWARD, "aten._log_softmax_backward_data", "float32", "gradient of the log-softmax's input"),
        (PhaseKind.BACKWARD, "aten._to_copy", "bfloat16", "gradient of the half-precision logits"),
        (PhaseKind.BACKWARD, "aten._to_copy", "float32", "gradient of the logits, upcast"),
        (PhaseKind.BACKWARD, "aten.div", "float32", "gradient of the logits"),
    ],
)
def test_what_a_copy_of_the_logits_is(phase: PhaseKind, op: str, dtype: str, label: str) -> None:
    b = TraceBuilder(phase)
    index = b.new(8, WORDS, op=op, dtype=dtype, forward_event=0)
    assert logits.describe(b.trace, b.trace.storages[index]) == label


@pytest.mark.parametrize(
    ("change", "are_logits"),
    [
        ({}, True),
        ({"shape": (64, WORDS - 1)}, False),
        ({"shape": (WORDS,)}, False),
        ({"shape": (512, WORDS)}, False),  # of the head
        ({"owner": (Role.GRADIENT, "head")}, False),
        ({"hidden": True}, False),
        ({"phase": PhaseKind.OPTIMIZER_STEP}, False),
        ({"phase": PhaseKind.BACKWARD}, True),
    ],
)
def test_logits_are_of_a_pass_and_have_one_number_for_each_word(change: dict[str, object], are_logits: bool) -> None:
    b = TraceBuilder()
    b.new(512, WORDS, owner=(Role.PARAMETER, "head"))
    b.phase(change.pop("phase", PhaseKind.FORWARD))  # type: ignore[arg-type]
    b.new(*change.pop("shape", (64, WORDS)), **change)  # type: ignore[misc, arg-type]
    assert bool(logits.find_logits_storages(b.context(vocab_size=WORDS))) == are_logits


def test_attention_scores_and_masks_are_counted_apart() -> None:
    finding = only(attention_scores.find(TestAttentionScores.eager().context()))
    assert finding.severity is Severity.WARNING
    assert all_figures(finding) == [
        ["1024", "1024", "model.py:1", "6", "321.00 MiB", "320.00 MiB", "1.00 MiB", "91%"],
        ["[1 x 16 x 1024 x 1024]", "float32", "64.00 MiB", "aten._softmax", "layers.*.attn", "attn.py:6", "4"],
        ["[16 x 1024 x 1024]", "float32", "64.00 MiB", "aten.bmm", "layers.*.attn", "transformers/attn.py:5", "1"],
        ["[1 x 1 x 1024 x 1024]", "bool", "1.00 MiB", "aten.le", "model.py:1", "1"],
        ["6", "321.00 MiB"],
    ]
    assert "Attention scores" in finding.title and finding.evidence[-1].num_bytes == 321 * MIB
    assert finding.fixes == ("sdpa-attention",) == list_fix_names(finding.suggestions)


# -- copies and state ------------------------------------------------------------------------------------------------


def test_copies_to_float32_where_most_are_live_and_at_the_peak() -> None:
    """Two of 32 MiB, one of which is freed before the peak of 32 + 90 + 36 MiB."""
    b = TraceBuilder()
    b.parameter("weight", 36 * MIB // 2, dtype="bfloat16")
    b.phase(PhaseKind.FORWARD)
    for layer in range(2):
        b.enter(f"layers.{layer}.mlp", "Mlp")
        copy = b.new(1, 4096, 2048, op="aten._to_copy", line="mlp.py:7 forward")
        b.leave()
    b.free(copy)
    b.new(90 * MIB // 2, dtype="bfloat16")
    finding = only(upcast.find(b.context()))
    assert (finding.severity, finding.num_bytes) == (Severity.WARNING, 64 * MIB)
    assert all_figures(finding) == [
        ["bfloat16", "float32", "mlp.py:7", "64.00 MiB", "32.00 MiB", "20%"],
        ["float32", "[1 x 4096 x 2048]", "float32", "32.00 MiB", "aten._to_copy", "layers.*.mlp", "mlp.py:7", "2", "1"],
    ]


@pytest.mark.parametrize(
    ("class_name", "role", "is_norm"),
    [
        ("LayerNorm", ModuleRole.OTHER, True),
        ("RMSNORM", ModuleRole.OTHER, True),
        ("T5Layer", ModuleRole.NORM, True),
        ("Mlp", ModuleRole.OTHER, False),
        (None, ModuleRole.OTHER, False),
    ],
)
@pytest.mark.parametrize("is_alone", [True, False])
def test_copies_of_norms_alone_are_a_note(
    class_name: str | None, role: ModuleRole, is_norm: bool, is_alone: bool
) -> None:
    b = training(4096, 100)
    if class_name is not None:
        b.enter("norm", class_name, role)
    b.new(1, 4096, 2048, op="aten._to_copy")
    if class_name is not None:
        b.leave()
    if not is_alone:
        b.new(1, 4096, 2048, op="aten._to_copy")
    is_note = only(upcast.find(b.context())).severity is Severity.NOTE
    assert is_note == (is_norm and is_alone)


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        ({}, True),
        ({"op": "aten.mul"}, False),
        ({"dtype": "bfloat16"}, False),
        ({"phase": PhaseKind.MODEL}, False),
        ({"owner": (Role.BUFFER, "a")}, False),
        ({"vocab_size": 2048}, False),
        ({"vocab_size": 4096}, True),
        ({"role": ModuleRole.HEAD}, False),  # what a head computes is logits
    ],
)
def test_copies_are_made_to_float32_in_a_forward_and_are_no_logits(change: dict[str, object], is_told: bool) -> None:
    settings: dict[str, object] = {"op": "aten._to_copy", "phase": PhaseKind.FORWARD} | change
    known = {"vocab_size": settings.pop("vocab_size")} if "vocab_size" in settings else {}
    b = training(4096, 100)
    b.trace.ops.append("aten._to_copy")
    b.phase(settings.pop("phase"))  # type: ignore[arg-type]
    b.enter("net", "Linear", settings.pop("role", ModuleRole.OTHER))  # type: ignore[arg-type]
    b.new(1, 4096, 2048, **settings)  # type: ignore[arg-type]
    b.leave()
    assert bool(upcast.find(b.context(**known))) == is_told  # type: ignore[arg-type]


def test_a_model_without_copies_and_a_line_with_few_of_them() -> None:
    b = training(4096, 100)
    assert not upcast.find(b.context())
    b.new(1, 4, 2048, op="aten._to_copy", line="a.py:1 f")
    b.new(1, 4096, 2048, op="aten._to_copy", line="a.py:2 f")
    assert "at a.py:2" in only(upcast.find(b.context())).title


def stepped() -> TraceBuilder:
    """State of 200 MiB in float32 for a parameter of 100; in the step, three temporaries of 70 MiB."""
    b = TraceBuilder()
    b.parameter("weight", 100 * MIB // 2, dtype="bfloat16")
    b.phase(PhaseKind.FORWARD)
    b.free(b.alloc(120 * MIB))
    b.phase(PhaseKind.BACKWARD)
    b.free(b.alloc(60 * MIB))
    b.phase(PhaseKind.OPTIMIZER_STEP)
    b.new(50 * MIB, op="aten.zeros_like", line="adam.py:1 init", owner=(Role.OPTIMIZER_STATE, "exp_avg"))
    b.new(op="aten.zeros", owner=(Role.OPTIMIZER_STATE, "step"))
    roots = [b.new(70 * MILLION, op="aten._foreach_sqrt", line=f"adam.py:{line} step") for line in (4, 5, 5)]
    b.free(*roots)
    return b


def test_state_in_float32_and_what_half_precision_would_save() -> None:
    finding = only(optimizer_state.find(stepped().context())[:1])
    assert (finding.severity, finding.num_bytes) == (Severity.NOTE, 100 * MIB)
    assert all_figures(finding) == [
        ["float32", "bfloat16", "200.00 MiB", "100.00 MiB", "bfloat16", "20%"],  # of 510 MiB
        ["[52428800]", "float32", "200.00 MiB", "aten.zeros_like", "adam.py:1", "1"],
    ]


def test_state_of_adam_in_float32_may_be_in_8_bits() -> None:
    b = stepped()
    b.new(50 * MIB, op="aten.zeros_like", owner=(Role.OPTIMIZER_STATE, "exp_avg_sq"))
    finding = only(optimizer_state.find(b.context())[:1])
    assert finding.fixes == ("8-bit-optimizer",) == tuple(one.fix for one in finding.suggestions)


@pytest.mark.parametrize("is_by_hand", [False, True])
def test_temporaries_of_the_step_and_the_stage_that_comes_next(is_by_hand: bool) -> None:
    b = stepped()
    b.new(MILLION, op="aten._foreach_mul")  # after the peak
    b.trace.updates_parameters_manually = is_by_hand
    finding = only(optimizer_state.find(b.context())[1:])
    assert (finding.severity, finding.num_bytes) == (Severity.NOTE, 210 * MIB)
    figures = [
        ["3", "210.00 MiB", "41%", "300.00 MiB"],
        ["[18350080]", "float32", "70.00 MiB", "aten._foreach_sqrt", "adam.py:5", "2"],
        ["[18350080]", "float32", "70.00 MiB", "aten._foreach_sqrt", "adam.py:4", "1"],
        ["220.00 MiB"],
    ]
    assert all_figures(finding)[:4] == figures
    assert finding.evidence[2].num_bytes == 220 * MIB
    assert [line.source for line in finding.evidence[3:]] == ["adam.py:4 step"] * is_by_hand


# -- shapes of a model -----------------------------------------------------------------------------------------------


def test_words_that_nobody_asked_for_in_everything_that_has_them() -> None:
    """Half of 2,000 rows, of the table, its gradient, its state, and of the logits of 64 tokens."""
    b = training(64, 2000)
    b.phase(PhaseKind.BACKWARD)
    b.new(2000, 512, dtype="bfloat16", owner=(Role.GRADIENT, "embed.weight"))
    b.new(2000, 512, dtype="bfloat16", owner=(Role.GRADIENT, "other"))
    b.new(1, 64, 2000)
    b.free(b.new(128, 2000))
    b.phase(PhaseKind.OPTIMIZER_STEP)
    b.new(2000, 512, owner=(Role.OPTIMIZER_STATE, "exp_avg"))
    b.new(2000, owner=(Role.OPTIMIZER_STATE, "exp_avg"))
    b.new(16 * MIB)
    finding = only(vocabulary.find(b.context(asked_vocab_size=1000)))
    sizes = [1000 * 512 * 2, 1000 * 512 * 2, 1000 * 512 * 4, 64 * 1000 * 4]
    assert (finding.severity, finding.num_bytes) == (Severity.WARNING, sum(sizes))
    assert finding.fixes == ("vocabulary-cap",)
    assert all_figures(finding) == [
        ["2,000", "1,000", "4.15 MiB", "5%"],
        ["[2000 x 512]", "bfloat16", "1,000.00 KiB", "1,000"],
        ["1,000.00 KiB"],
        ["1,000.00 KiB"],
        ["1.95 MiB"],
        ["250.00 KiB"],
    ]
    assert [line.num_bytes for line in finding.evidence] == [sizes[0], *sizes]
    assert finding.evidence[0].text.startswith("embed.weight is")
    kinds = [line.text.partition(" of the")[0] for line in finding.evidence[1:]]
    assert kinds == ["parameters", "gradients", "optimizer state", "logits and loss"]
    assert len(only(vocabulary.find(training(64, 2000).context(asked_vocab_size=1000))).evidence) == 2


def delta(rows: str, columns: str) -> list[str]:
    return ["64", f"[{rows} x {columns}]", f"[64 x {rows} x {columns}]", "float32", "128.00 MiB"]


def test_a_matrix_for_each_token_with_the_line_that_makes_it_first() -> None:
    b = TraceBuilder()
    for layer in range(2):
        b.parameter(f"layers.{layer}.up.weight", 1024, 512)
    b.inputs(1, 64)
    for layer in range(2):
        b.enter(f"layers.{layer}.up")
        b.new(64, 512, 1024, op="aten.bmm", line="npt.py:1 forward")
        last = b.new(64, 1024, 512, op="aten.mul", line="npt.py:2 forward")
        b.leave()
    b.free(last)
    b.new(508 * MILLION)
    finding = only(weight_delta.find(b.context()))
    assert (finding.severity, finding.num_bytes) == (Severity.WARNING, 512 * MIB)
    assert all_figures(finding) == [
        ["512", "1024", "64", "128.00 MiB", "npt.py:1", "layers.*.up", "4", "512.00 MiB", "57%"],
        [*delta("512", "1024"), "aten.bmm", "layers.*.up", "npt.py:1", "2"],
        [*delta("1024", "512"), "aten.mul", "layers.*.up", "npt.py:2", "2", "1"],
    ]


def test_positions_that_end_before_the_context() -> None:
    b = training(64, 100)
    b.parameter("wpe.weight", 1024, 512)
    finding = only(positions.find(b.context(context_length=2048, max_positions=1024)))
    assert all_figures(finding) == [["2,048", "1,024"], ["[1024 x 512]"]]
    assert finding.severity is Severity.ERROR and finding.evidence[0].text.startswith("wpe.weight")


@pytest.mark.parametrize(
    ("name", "rows", "is_error"),
    [
        ("wpe.weight", 1024, True),
        ("embed_positions.weight", 1026, True),
        ("pos_embed", 2047, True),
        ("decoder.position.weight", 1024, True),
        ("wpe.weight", 1023, False),
        ("wpe.weight", 2048, False),
        ("composer.weight", 1024, False),
    ],
)
def test_learned_positions_have_a_row_each(name: str, rows: int, is_error: bool) -> None:
    for shape, can_be in (((rows, 512), True), ((rows,), False), ((rows, 2, 512), False)):
        b = training(64, 100)
        b.parameter(name, *shape)
        finding = only(positions.find(b.context(context_length=2048, max_positions=1024)))
        assert (finding.severity is Severity.ERROR) == (is_error and can_be)


# -- other -----------------------------------------------------------------------------------------------------------


def test_what_belongs_to_no_category_the_largest_first() -> None:
    b = training(64, 100)  # 2.35 MiB
    b.phase(PhaseKind.OTHER, 0)
    for count in range(2, 14, 2):
        for _ in range(2 if count == 12 else 1):
            b.new(count * MILLION, op="aten.empty", line=None if count == 10 else f"train.py:{count} main")
    finding = only(unattributed.find(b.context()))
    assert (finding.severity, finding.num_bytes) == (Severity.NOTE, 54 * MIB)
    assert all_figures(finding) == [
        ["54.00 MiB", "96%"],
        ["2", "[3145728]", "float32", "12.00 MiB", "aten.empty", "train.py:12"],
        ["1", "[2621440]", "float32", "10.00 MiB", "aten.empty"],
        ["1", "[2097152]", "float32", "8.00 MiB", "aten.empty", "train.py:8"],
        ["1", "[1572864]", "float32", "6.00 MiB", "aten.empty", "train.py:6"],
        ["1", "[1048576]", "float32", "4.00 MiB", "aten.empty", "train.py:4"],
    ]


def compiled(gelu_mib: int = 40, more_mib: int = 60, other_mib: int = 10) -> TraceBuilder:
    """Two calls of a graph, of each of which one tensor by gelu is live, and three of twenty by mul."""
    b = TraceBuilder(PhaseKind.FORWARD)
    b.alloc(other_mib * MIB)
    saved = CompiledSavedTensors
    b.trace.compiled_keeps += [
        saved(0, more_mib * MIB, "aten.gelu", "model.py:1 forward", gelu_mib * MIB, 1, False),
        saved(0, more_mib * MIB, "aten.mul", "model.py:2 forward", 10 * MIB, 10, True),
        saved(1, 999 * MIB, "aten.sin", "model.py:3 forward", 10 * MIB, 1, False),
    ]
    for op, mib, line in (("gelu", gelu_mib, 1), ("gelu", gelu_mib, 1), ("mul", 10, 2), ("mul", 10, 2), ("mul", 10, 2)):
        b.new(mib * MILLION, op=f"aten.{op}", line=f"model.py:{line} forward")
    b.new(10 * MILLION, op="aten.sin", line="model.py:3 forward", hidden=True)
    b.free(b.new(10 * MILLION, op="aten.sin", line="model.py:3 forward"))
    b.alloc(20 * MIB)
    return b


def test_what_compiled_code_keeps_of_the_calls_that_are_live_at_the_peak() -> None:
    finding = only(compiled_saved_tensors.find(compiled().context()))
    assert (finding.id, finding.severity, finding.num_bytes) == ("compiled-keeps", Severity.WARNING, 120 * MIB)
    assert all_figures(finding)[:3] == [
        ["120.00 MiB", "80%"],
        ["20", "10.00 MiB", "aten.mul", "model.py:2"],
        ["2", "40.00 MiB", "aten.gelu", "model.py:1"],
    ]
    assert ["computes it again" in line.text for line in finding.evidence[:2]] == [True, False]
    assert [line.source for line in finding.evidence[:2]] == ["model.py:2 forward", "model.py:1 forward"]
    assert "cse = False" in finding.evidence[-1].text
    b = compiled()
    b.trace.compiled_keeps = [one._replace(again=False) for one in b.trace.compiled_keeps]
    assert "cse" not in only(compiled_saved_tensors.find(b.context())).evidence[-1].text
    b = TraceBuilder(PhaseKind.FORWARD)
    b.trace.compiled_keeps.append(CompiledSavedTensors(0, 80 * MIB, "aten.sin", "", 80 * MIB, 1, False))
    b.new(80 * MILLION, op="aten.sin", line=None)
    line = only(compiled_saved_tensors.find(b.context())).evidence[0]
    assert line.source is None and "an unknown line" in line.text


@pytest.mark.parametrize(
    ("more_mib", "other_mib", "is_told"), [(30, 10, False), (32, 10, True), (32, 1140, True), (32, 1142, False)]
)
def test_compiled_code_keeps_at_least_both(more_mib: int, other_mib: int, is_told: bool) -> None:
    """64 MiB and a twentieth of the peak, which has 140 MiB more than `other_mib`."""
    found = compiled_saved_tensors.find(compiled(more_mib=more_mib, other_mib=other_mib).context())
    assert bool(found) == is_told


def test_graph_breaks_the_largest_first() -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.alloc(1000 * MIB)
    b.trace.graph_ends += [GraphBreak(f"train.py:{n} main", "a print", n * 20 * MIB) for n in range(6)]
    finding = only(graph_breaks.find(b.context()))
    assert (finding.id, finding.severity, finding.num_bytes) == ("graph-breaks", Severity.NOTE, None)
    assert all_figures(finding) == [
        ["5", "100.00 MiB", "10%"],
        *([f"{n * 20}.00 MiB", f"train.py:{n}"] for n in (5, 4, 3, 2)),
        [],
    ]
    assert finding.evidence[0].text.endswith(": a print") and finding.evidence[0].source == "train.py:5 main"
    b.trace.graph_ends = b.trace.graph_ends[-1:]
    assert "at a line," in only(graph_breaks.find(b.context())).title


def test_caught_errors_with_what_was_in_use() -> None:
    b = TraceBuilder(PhaseKind.FORWARD)
    b.alloc(20 * MIB)
    b.phase(PhaseKind.FORWARD, 3)
    for size in (2 * GIB, 4 * GIB):
        refused = b.new(size, dtype="bool", op="aten.zeros", line="train.py:5 main")
        b.trace.refused.append(refused)
        b.free(refused)
    finding = only(out_of_memory_caught.find(b.context(GIB)))
    assert (finding.severity, finding.num_bytes) == (Severity.WARNING, 4 * GIB)
    assert all_figures(finding) == [
        ["2"],
        ["3", "2.00 GiB", "[2147483648]", "bool", "aten.zeros", "train.py:5", "20.00 MiB"],
        ["3", "4.00 GiB", "[4294967296]", "bool", "aten.zeros", "train.py:5", "20.00 MiB"],
    ]
    assert [line.num_bytes for line in finding.evidence] == [2 * GIB, 4 * GIB]
    assert finding.title.startswith("2 out-of-memory errors raised")
    del b.trace.refused[1:]
    finding = only(out_of_memory_caught.find(b.context(GIB)))
    assert finding.title.startswith("1 out-of-memory error raised") and "with --beyond none is raised" in finding.title
