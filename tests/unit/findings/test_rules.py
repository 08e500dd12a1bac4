"""Each rule on hand-written traces: where it must speak, and where it must not."""

from __future__ import annotations

import pytest

from memprof.findings import Context, Finding, Severity, Suggestion, find_all
from memprof.findings.attention_scores import find_score_storages
from memprof.findings.finding import cache_per_context
from memprof.findings.suggestions import list_fix_names
from memprof.findings.weight_delta import _find_matrices_per_token
from memprof.spec import Mode, TargetSpec
from memprof.trace.events import NONE, ModuleRole, PhaseKind, Role
from memprof.units import GIB, MIB
from tests.unit.findings.figures import figures
from tests.unit.traces import TraceBuilder


def of(context: Context, identifier: str) -> list[Finding]:
    """Findings of one rule; all of them are well-formed."""
    findings = find_all(context)
    for finding in findings:
        assert finding.evidence and finding.title and "\n" not in finding.title
        assert finding.num_bytes is None or finding.num_bytes > 0
    return [finding for finding in findings if finding.id == identifier]


def training(tokens: int, vocabulary: int, hidden: int = 512, dtype: str = "bfloat16", layers: int = 1) -> TraceBuilder:
    """A small language model up to its head: parameters, inputs, layers."""
    b = TraceBuilder()
    b.parameter("embed.weight", vocabulary, hidden, dtype=dtype)
    for layer in range(layers):
        b.parameter(f"layers.{layer}.mlp.weight", 4 * hidden, hidden, dtype=dtype)
    b.inputs(1, tokens)
    for layer in range(layers):
        b.enter(f"layers.{layer}", "Layer", ModuleRole.LAYER)
        b.new(tokens, 4 * hidden, dtype=dtype, line="model.py:20 forward")
        b.leave()
    return b


def head_and_loss(b: TraceBuilder, tokens: int, vocabulary: int) -> None:
    """Logits in half precision, their upcast, log-softmax and gradients; four of them live together at the end."""
    b.enter("lm_head", "Linear", ModuleRole.HEAD)
    head = len(b.trace.events)
    b.new(tokens, vocabulary, dtype="bfloat16", op="aten.mm", line="model.py:30 forward")
    b.leave()
    up = b.new(1, tokens, vocabulary, op="aten._to_copy", line="loss.py:5 loss")
    b.new(tokens, vocabulary, op="aten._log_softmax", line="loss.py:6 loss")
    b.free(up)
    b.phase(PhaseKind.BACKWARD)
    b.new(tokens, vocabulary, op="aten.nll_loss_backward", line="loss.py:6 loss", forward_event=head + 2)
    b.new(tokens, vocabulary, op="aten._log_softmax_backward_data", line="loss.py:6 loss", forward_event=head + 2)


class TestDoesNotFit:
    def test_names_what_dies_and_what_is_missing(self) -> None:
        b = training(4096, 32000, layers=3)
        head_and_loss(b, 4096, 32000)
        context = b.context(400 * MIB, gpu="GPU", spec=TargetSpec(model="x"))
        (finding,) = of(context, "does-not-fit")
        assert finding.severity is Severity.ERROR
        assert finding.num_bytes == context.ledger.peak_reserved_bytes - 400 * MIB
        assert "loss of step 1" in finding.title and "500.00 MiB" in finding.title
        died = finding.evidence[0]
        assert (died.shape, died.dtype, died.source) == ((1, 4096, 32000), "float32", "loss.py:5 loss")
        assert finding.fixes[0] == finding.suggestions[0].fix == "chunked-loss"
        assert "micro-batch" not in finding.fixes  # the batch is 1 already

    def test_names_the_layer(self) -> None:
        b = training(4096, 1000, layers=0)
        for layer in range(4):
            b.enter(f"layers.{layer}", "Layer", ModuleRole.LAYER)
            b.new(4096, 2048, dtype="bfloat16", line="model.py:20 forward")
            b.new(4096, 256, dtype="bfloat16", line="model.py:21 forward")
            b.leave()
        b.phase(PhaseKind.BACKWARD)
        (finding,) = of(b.context(60 * MIB), "does-not-fit")
        assert "layer 2 of step 1" in finding.title
        assert finding.fixes[0] == "activation-checkpointing"

    def test_inference_is_not_told_to_checkpoint(self) -> None:
        spec = TargetSpec(model="x", mode=Mode.INFERENCE, batch_size=2)
        (finding,) = of(training(4096, 1000, layers=4).context(50 * MIB, spec=spec), "does-not-fit")
        assert "activation-checkpointing" not in finding.fixes and "micro-batch" in finding.fixes

    @pytest.mark.parametrize("usable", [None, GIB])
    def test_silent_when_it_fits_or_there_is_no_gpu(self, usable: int | None) -> None:
        assert not of(training(4096, 1000).context(usable), "does-not-fit")


class TestOutOfMemoryCaught:
    def test_names_every_request_that_was_refused(self) -> None:
        b = training(4096, 1000)
        for size in (4 * GIB, 2 * GIB):
            refused = b.new(size, dtype="bool", op="aten.zeros", line="train.py:5 <module>")
            b.trace.refused.append(refused)
            b.free(refused)
        (finding,) = of(b.context(GIB), "out-of-memory-caught")
        assert finding.severity is Severity.WARNING and finding.num_bytes == 4 * GIB
        assert finding.title.startswith("2 out-of-memory errors raised and caught: the report is of what")
        assert [evidence.num_bytes for evidence in finding.evidence] == [4 * GIB, 2 * GIB]
        assert "4.00 GiB for [4294967296] bool in aten.zeros at train.py:5" in finding.evidence[0].text
        assert finding.evidence[0].source == "train.py:5 <module>"

    def test_silent_when_nothing_was_refused(self) -> None:
        assert not of(training(4096, 1000).context(GIB), "out-of-memory-caught")


class TestLogits:
    def test_lists_every_copy(self) -> None:
        b = training(8192, 50000)
        head_and_loss(b, 8192, 50000)
        (finding,) = of(b.context(vocab_size=50000), "logits-explosion")
        once = 8192 * 50000
        assert finding.num_bytes == once * (2 + 4 + 4 + 4)
        assert "4 copies of [8192 x 50000]" in finding.title
        labels = {line.text.partition(":")[0]: line.num_bytes for line in finding.evidence[:-1]}
        assert labels == {
            "logits": once * 2,
            "float32 upcast": once * 4,
            "log-softmax": once * 4,
            "gradient of the log-softmax": once * 4,
            "gradient of the log-softmax's input": once * 4,
        }

    def test_vocabulary_is_inferred(self) -> None:
        b = training(8192, 50000)
        head_and_loss(b, 8192, 50000)
        assert of(b.context(), "logits-explosion")

    @pytest.mark.parametrize("weights", [1, 2])
    def test_as_many_rows_as_the_model_is_wide_are_no_words(self, weights: int) -> None:
        """A projection may be called an embedding; a head that is kept transposed takes in its words alone."""
        b = TraceBuilder()
        b.parameter("time_embed.weight", 2048, 256)
        for number in range(weights):
            b.parameter(f"blocks.{number}.weight", 8192, 2048)
        b.inputs(1, 64)
        b.new(1024, 256, 2048)
        b.new(1024, 256, 2048, op="aten.native_layer_norm")
        assert bool(of(b.context(), "logits-explosion")) == (weights == 1)

    def test_silent_on_logits_that_pile_up(self) -> None:
        """Those are a leak, which memory-growth tells; a loss of some tokens at a time would free none of them."""
        b = training(8192, 50000)
        for step in range(1, 6):
            b.phase(PhaseKind.FORWARD, step)
            b.new(8192, 50000, line="train.py:7 main")
            b.phase(PhaseKind.BACKWARD, step)
            b.phase(PhaseKind.OPTIMIZER_STEP, step)
            b.phase(PhaseKind.OTHER, step)
        context = b.context(1000 * GIB, vocab_size=50000)
        assert of(context, "memory-growth") and not of(context, "logits-explosion")

    def test_silent_on_chunks(self) -> None:
        b = training(8192, 50000)
        for _ in range(16):
            chunk = [b.new(512, 50000), b.new(512, 50000, op="aten._log_softmax")]
            b.free(*chunk)
        assert not of(b.context(vocab_size=50000), "logits-explosion")

    def test_silent_on_gradients_of_a_transposed_head(self) -> None:
        b = TraceBuilder()
        b.parameter("head", 16384, 50000)
        b.inputs(1, 64)
        b.new(64, 16384)
        b.phase(PhaseKind.BACKWARD)
        b.new(16384, 50000, op="aten.mm", owner=(Role.GRADIENT, "head"))
        b.new(16384, 50000, op="aten.mm")
        assert not of(b.context(vocab_size=50000), "logits-explosion")


class TestWeightDelta:
    @pytest.mark.parametrize(
        "shape", [(4, 512, 4096, 14336), (2048, 4096, 14336), (1, 2048 * 4096, 14336), (2048, 4096 * 14336)]
    )
    def test_every_layout_of_the_einsum(self, shape: tuple[int, ...]) -> None:
        b = TraceBuilder()
        b.parameter("up.weight", 14336, 4096)
        b.inputs(4, 512)
        b.new(*shape, op="aten.bmm", line="npt.py:13 forward")
        (finding,) = of(b.context(), "weight-delta-per-token")
        assert finding.num_bytes == 4 * 512 * 4096 * 14336 * 4
        assert "448.00 GiB" in finding.title and "npt.py:13" in finding.title
        assert not finding.fixes  # of another model than memprof's NPT
        spec = TargetSpec(model="x", npt="dense", batch_size=4)
        (finding,) = of(b.context(spec=spec), "weight-delta-per-token")
        assert finding.fixes == ("low-rank-npt",)

    @pytest.mark.parametrize(
        "shape",
        [
            (4, 14336, 4096),  # for one token of each sequence: the fix
            (2048, 14336),
            (4, 512, 128256),
            (2048, 128256),
            (4, 32, 512, 512),
            (128, 512, 512),
            (8, 14336, 4096),  # experts
        ],
    )
    def test_silent_on_what_every_model_has(self, shape: tuple[int, ...]) -> None:
        b = TraceBuilder()
        for name, rows, columns in (("up", 14336, 4096), ("lm_head", 128256, 4096), ("o_proj", 512, 512)):
            b.parameter(f"{name}.weight", rows, columns)
        b.inputs(4, 512)
        for _ in range(64):
            b.new(*shape)
        assert not of(b.context(vocab_size=128256, context_length=512), "weight-delta-per-token")

    @pytest.mark.parametrize("shape", [(8192, 8192), (4096, 8192), (4, 2048, 8192), (16, 512, 8192)])
    def test_silent_on_features_of_tokens_beside_a_smaller_input(self, shape: tuple[int, ...]) -> None:
        """16 numbers (lengths of packed texts), and a width of 512: 16 x 512 is the number of the tokens."""
        b = TraceBuilder()
        b.parameter("up.weight", 8192, 2048)
        b.parameter("k_proj.weight", 512, 2048)
        b.inputs(4, 2048)
        b.inputs(16)
        for _ in range(32):
            b.new(*shape)
        assert not of(b.context(), "weight-delta-per-token")

    def test_silent_on_scores_of_as_many_tokens_as_features(self) -> None:
        """And as many sequences times heads as something else that the program has fed its model with."""
        b = TraceBuilder()
        b.parameter("q_proj.weight", 512, 512)
        b.inputs(4, 512)
        b.inputs(1, 32)
        for op in ("aten.masked_fill", "aten._softmax"):
            b.new(4, 8, 512, 512, op=op)
        assert not of(b.context(), "weight-delta-per-token")
        assert of(b.context(), "attention-scores")

    def test_silent_on_maps_of_images(self) -> None:
        b = TraceBuilder()
        b.parameter("attention.weight", 256, 256)
        b.inputs(2, 64)
        b.new(2, 64, 256, 256, op="aten.silu", dtype="bfloat16")
        assert of(b.context(), "weight-delta-per-token")
        b.new(2, 64, 256, 256, op="aten.convolution", dtype="bfloat16")
        assert not of(b.context(), "weight-delta-per-token")

    @pytest.mark.parametrize("module", ["block.up", "time"])
    def test_sizes_are_those_of_the_module_that_multiplies_its_weights(self, module: str) -> None:
        """[tokens x 256 x 1152] in a block whose own weights have no 256: another module's time embedding has."""
        b = TraceBuilder()
        b.parameter("time.weight", 1152, 256)
        b.parameter("block.up.weight", 4608, 1152)
        b.inputs(4, 512)
        b.enter(module)
        b.new(2048, 256, 1152, op="aten.bmm")
        assert bool(of(b.context(), "weight-delta-per-token")) == (module == "time")

    @pytest.mark.parametrize(("given", "is_found"), [((32,), False), ((32, 1), False), ((16, 2), True)])
    def test_a_label_for_each_sample_is_no_text(self, given: tuple[int, ...], is_found: bool) -> None:
        """[images x patches x features], in a block that mixes its 256 patches by a weight."""
        b = TraceBuilder()
        b.parameter("mix.weight", 256, 512)
        b.parameter("up.weight", 1152, 4608)
        b.inputs(*given)
        b.new(32, 256, 4608, op="aten.bmm")
        assert bool(of(b.context(), "weight-delta-per-token")) == is_found

    def test_silent_on_gradients_of_as_many_experts_as_tokens(self) -> None:
        b = TraceBuilder()
        b.parameter("experts.up", 256, 4096, 2048)
        b.inputs(1, 256)
        b.phase(PhaseKind.BACKWARD)
        b.new(256, 4096, 2048)
        assert not of(b.context(), "weight-delta-per-token")

    @pytest.mark.parametrize(
        ("change", "is_found"),
        [
            ({}, True),
            ({"hidden": True}, False),
            ({"owner": (Role.BUFFER, "a")}, False),
            ({"phase": PhaseKind.MODEL}, False),
            ({"phase": PhaseKind.BACKWARD}, True),
            ({"vocab_size": 1024}, False),  # logits
            ({"vocab_size": 512}, False),  # a dimension of as many words is no feature's
            ({"shape": (1024, 512)}, False),  # the weight, cast
            ({"shape": (64, 512, 1000)}, False),
            ({"shape": (64, 500, 1024)}, False),
            ({"shape": (32, 512, 1024)}, False),
            ({"shape": (64, 512, 512)}, True),
            ({"context_length": 512, "shape": (64, 512, 512)}, False),  # scores of as many tokens
            ({"shape": (64, 512 * 1024)}, True),
            ({"shape": (64, 1024 * 1024)}, False),
            ({"shape": (1, 64 * 512, 1024)}, True),
            ({"shape": (64, 64 * 8, 1024)}, True),
        ],
    )
    def test_a_matrix_of_the_sizes_of_weights_for_each_token(self, change: dict[str, object], is_found: bool) -> None:
        settings: dict[str, object] = {"shape": (64, 512, 1024), "phase": PhaseKind.FORWARD} | change
        known = {name: settings.pop(name) for name in ("vocab_size", "context_length") if name in settings}
        b = TraceBuilder()
        b.parameter("up.weight", 1024, 512)
        b.inputs(2, 32)
        b.phase(settings.pop("phase"))  # type: ignore[arg-type]
        b.new(*settings.pop("shape"), **settings)  # type: ignore[misc, arg-type]
        assert bool(_find_matrices_per_token(b.context(**known))) == is_found  # type: ignore[arg-type]


class TestDeviceMismatch:
    def test_says_where_and_what_to_do(self) -> None:
        b = training(64, 100)
        for layer in range(2):
            b.enter(f"layers.{layer}.rope", "Rope")
            b.mismatch(
                "aten.mul",
                "rope.py:9 forward",
                ("cpu", (64, 1), "rope.py:8 forward"),
                ("cuda:0", (32,), "train.py:3 <module>"),
            )
            b.leave()
        (finding,) = of(b.context(), "device-mismatch")
        assert finding.severity is Severity.ERROR and finding.num_bytes is None
        assert "rope.py:9" in finding.title and "rope.py:8" in finding.title
        texts = [line.text for line in finding.evidence]
        assert "2 times" in texts[0] and "layers.*.rope" in texts[0]
        assert any(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!" in text
            for text in texts
        )
        assert "at rope.py:8 create it with device=" in texts[-1]
        assert [line.device for line in finding.evidence[1:3]] == ["cpu", "cuda:0"]

    def test_matrix_products_name_the_argument(self) -> None:
        b = training(64, 100)
        b.mismatch("aten.mm", "a.py:1 f", ("cuda:0", (4, 4), "a.py:2 f"), ("cpu", (4, 4), "a.py:3 f"))
        (finding,) = of(b.context(), "device-mismatch")
        assert "got mat2 is on cpu, different from other tensors on cuda:0" in finding.evidence[3].text
        assert "made on cpu at a.py:3" in finding.title

    def test_silent_without(self) -> None:
        assert not of(training(64, 100).context(), "device-mismatch")

    def test_facts_of_each_operand_and_of_the_module(self) -> None:
        b = training(64, 100)
        b.enter("", "Net")
        b.mismatch("aten.add", "a.py:1 f", ("cuda:0", (4, 4), "a.py:2 f"), ("cpu", (8,), "a.py:3 f"))
        (finding,) = of(b.context(), "device-mismatch")
        assert figures(finding.title) == ["aten.add", "a.py:1", "0", "[8]", "float32", "a.py:3"]
        met, first, second, error, fix = finding.evidence
        assert met.text == "aten.add met them at a.py:1 in the model"
        assert (met.op, met.source, met.module) == ("aten.add", "a.py:1 f", "")
        assert figures(first.text) == ["[4 x 4]", "float32", "0", "a.py:2"]
        assert (first.shape, first.dtype, first.device, first.source) == ((4, 4), "float32", "cuda:0", "a.py:2 f")
        assert figures(second.text) == ["[8]", "float32", "a.py:3"] and second.module == ""
        assert (error.op, error.source, fix.source) == ("aten.add", "a.py:1 f", "a.py:3 f")
        assert fix.text.count("<the cuda:0 tensor>.device") == 2 and "before a.py:1" in fix.text
        assert finding.fixes == ("device-placement",)

    def test_two_gpus_need_a_move_and_no_fix_of_memprof(self) -> None:
        b = training(64, 100)
        b.mismatch("aten.add", "a.py:1 f", ("cuda:0", (4,), "a.py:2 f"), ("cuda:1", (4,), "a.py:3 f"))
        (finding,) = of(b.context(), "device-mismatch")
        assert finding.fixes == ()
        assert finding.evidence[-1].text == "fix: move it with .to(<the cuda:0 tensor>.device) before a.py:1"
        assert finding.evidence[0].text == "aten.add met them at a.py:1"

    def test_what_no_line_has_made_is_to_be_moved_or_registered(self) -> None:
        b = training(64, 100)
        b.mismatch("aten.add", "a.py:1 f", ("cuda:0", (4,), "a.py:2 f"), ("cpu", (4,), "a.py:3 f"))
        (mismatch,) = b.trace.mismatches
        operands = (mismatch.operands[0], mismatch.operands[1]._replace(source=NONE))
        b.trace.mismatches[0] = mismatch._replace(operands=operands)
        (finding,) = of(b.context(), "device-mismatch")
        assert finding.evidence[-1].text.startswith("fix: move it with .to(<the cuda:0 tensor>.device) before a.py:1; ")
        assert "made at an unknown line" in finding.evidence[2].text and finding.evidence[-1].source == "a.py:1 f"

    @pytest.mark.parametrize(
        ("change", "num_findings"),
        [
            ({}, 1),
            ({"shape": (8,)}, 1),  # of another size
            ({"shape": (4, 4)}, 2),
            ({"made": "a.py:9 f"}, 2),
            ({"op": "aten.mul"}, 2),
            ({"line": "a.py:9 f"}, 2),
            ({"device": "cuda:1"}, 2),
        ],
    )
    def test_mismatches_that_are_alike_are_one(self, change: dict[str, object], num_findings: int) -> None:
        b = training(64, 100)
        own = {"op": "aten.add", "line": "a.py:1 f", "device": "cpu", "shape": (4,), "made": "a.py:3 f"}
        for one in (own, own | change):
            operand = (one["device"], one["shape"], one["made"])
            b.mismatch(one["op"], one["line"], ("cuda:0", (4,), "a.py:2 f"), operand)  # type: ignore[arg-type]
        assert len(of(b.context(), "device-mismatch")) == num_findings


class TestAttentionScores:
    @staticmethod
    def eager(op: str = "aten._softmax") -> TraceBuilder:
        b = training(1024, 100, hidden=1024, dtype="float32")
        b.new(1, 1, 1024, 1024, dtype="bool", op="aten.le")
        for layer in range(4):
            b.enter(f"layers.{layer}.attn", "Attention")
            bmm = b.new(16, 1024, 1024, op="aten.bmm", line="/x/transformers/attn.py:5 eager")
            b.new(1, 16, 1024, 1024, op=op, line="attn.py:6 eager")
            b.free(bmm)
            b.leave()
        return b

    def test_scores_and_mask(self) -> None:
        (finding,) = of(self.eager().context(), "attention-scores")
        # Four softmax outputs stay; beside them the product of the last layer and the mask.
        assert finding.num_bytes == 5 * 64 * MIB + MIB
        assert {line.text.partition(":")[0] for line in finding.evidence[:-1]} == {"scores", "mask"}
        assert finding.fixes == ("sdpa-attention",) == list_fix_names(finding.suggestions)

    @pytest.mark.parametrize(
        ("class_name", "op", "shape", "is_told"),
        [
            ("LlamaAttention", "aten.bmm", (32, 4096, 4096), True),
            ("GlobalAttn", "aten.bmm", (32, 4096, 4096), True),
            ("Mixer", "aten.bmm", (32, 4096, 4096), False),
            ("LlamaAttention", "aten.mm", (32, 4096, 4096), False),
            ("LlamaAttention", "aten.bmm", (32, 4096, 2048), False),
        ],
    )
    def test_scores_that_memory_runs_out_in(
        self, class_name: str, op: str, shape: tuple[int, ...], is_told: bool
    ) -> None:
        """In their cast to float32, before the softmax; the product is there."""
        b = TraceBuilder(PhaseKind.FORWARD)
        b.new(1, 4096, dtype="int64", owner=(Role.INPUT, ""))
        b.enter("layers.0.attn", class_name)
        b.new(*shape, op=op, dtype="bfloat16")
        b.new(1, *shape, op="aten._to_copy", line="attn.py:6 eager")
        b.leave()
        b.trace.ended_out_of_memory = True
        assert bool(of(b.context(2 * GIB), "attention-scores")) == is_told

    def test_scores_are_not_told_of_as_upcasts_too(self) -> None:
        b = training(1024, 100)
        for _ in range(4):
            b.new(1, 16, 1024, 1024, op="aten._to_copy")
            b.new(1, 16, 1024, 1024, op="aten._softmax")
        assert of(b.context(), "attention-scores") and not of(b.context(), "float32-upcast")

    def test_sums_of_two_terms_are_not_told_to_use_sdpa(self) -> None:
        b = training(1024, 100)
        for _ in range(4):
            b.new(8, 1024, 1024, op="aten.add", line="gat.py:1 scores")
            b.new(8, 1024, 1024, op="aten._softmax", line="gat.py:2 softmax")
        (finding,) = of(b.context(), "attention-scores")
        assert not finding.fixes

    @pytest.mark.parametrize("op", ["aten.convolution", "aten.upsample_bilinear2d"])
    def test_a_softmax_over_the_channels_of_an_image_is_no_attention(self, op: str) -> None:
        b = training(1024, 100)
        for _ in range(4):
            b.new(8, 32, 512, 512, op=op)
        b.new(8, 21, 512, 512, op="aten._softmax")
        assert not of(b.context(), "attention-scores")

    @pytest.mark.parametrize("op", ["aten.mm", "aten.bmm"])
    def test_a_softmax_over_prototypes_is_no_attention(self, op: str) -> None:
        """A teacher's, of some of its tokens: as many numbers as the layer before has outputs."""
        b = training(1024, 100)
        b.new(*(() if op == "aten.mm" else (1,)), 1200, 1024, op=op, line="head.py:1 last_layer")
        for _ in range(40):
            b.new(1, 900, 1024, op="aten._softmax", line="loss.py:1 teacher")
        assert bool(of(b.context(), "attention-scores")) == (op == "aten.bmm")

    def test_math_path_of_sdpa_is_not_told_to_use_sdpa(self) -> None:
        (finding,) = of(self.eager("aten._safe_softmax").context(), "attention-scores")
        assert "sdpa-attention" not in finding.fixes
        assert "math path" in finding.evidence[-1].text

    def test_silent_on_features_as_many_as_tokens(self) -> None:
        b = training(1024, 100, hidden=1024)
        for _ in range(8):
            b.new(1, 1024, 1024)
            b.new(1, 16, 1024, 64, op="aten._scaled_dot_product_flash_attention")
        assert not of(b.context(context_length=1024), "attention-scores")

    def test_mask_without_scores(self) -> None:
        b = training(4096, 100)
        for _ in range(4):
            b.new(1, 1, 4096, 4096, op="aten.where", line="mask.py:1 mask")
        (finding,) = of(b.context(context_length=4096), "attention-scores")
        assert "Attention masks" in finding.title


LENGTH = 512


class TestScoreStorages:
    """Which tensors are scores, and which are masks: 512 tokens in sequences of two."""

    @staticmethod
    def labels(*made: tuple[object, ...], inputs: bool = True, **known: object) -> list[str | None]:
        """The labels of tensors, each given as (operator, data type, shape...)."""
        b = TraceBuilder()
        if inputs:
            b.inputs(2, LENGTH)
        else:
            b.phase(PhaseKind.FORWARD)
        indices = [b.new(*shape, op=f"aten.{op}", dtype=str(dtype)) for op, dtype, *shape in made]  # type: ignore[misc]
        found = find_score_storages(b.context(**known))  # type: ignore[arg-type]
        return [found.get(index) for index in indices]

    @pytest.mark.parametrize(
        ("op", "shape", "is_score"),
        [
            ("_softmax", (2, 4, LENGTH, LENGTH), True),
            ("_safe_softmax", (2, 4, LENGTH, LENGTH), True),
            ("_log_softmax", (2, 4, LENGTH, LENGTH), False),
            ("_softmax_backward_data", (2, 4, LENGTH, LENGTH), False),
            ("_attention_softmax", (2, 4, LENGTH, LENGTH), False),
            ("mul", (2, 4, LENGTH, LENGTH), False),
            ("_softmax", (2, 4, 300, LENGTH), True),  # as many keys as tokens
            ("_softmax", (2, 4, LENGTH, 300), False),
            ("_softmax", (2, 4, 300, 300), True),  # as many queries as keys
            ("_softmax", (2, 4, 256, 256), True),
            ("_softmax", (2, 4, 255, 255), False),
            ("_softmax", (2, 4, 255, LENGTH), False),
            ("_softmax", (LENGTH, LENGTH), False),
        ],
    )
    def test_a_softmax_over_keys(self, op: str, shape: tuple[int, ...], is_score: bool) -> None:
        assert self.labels((op, "float32", *shape)) == (["scores"] if is_score else [None])

    def test_what_has_as_many_numbers_as_a_softmax_is_of_it(self) -> None:
        labels = self.labels(
            ("_softmax", "float32", 2, 4, LENGTH, LENGTH),
            ("bmm", "float32", 8, LENGTH, LENGTH),
            ("bmm", "float32", 4, LENGTH, LENGTH),
            ("add", "float32", 2, 4, LENGTH, LENGTH),
            ("add", "float32", 2, 4 * LENGTH, LENGTH),
            ("le", "bool", 2, 4, LENGTH, LENGTH),
        )
        assert labels == ["scores", "scores", None, "scores", None, "mask"]

    def test_the_title_has_queries_and_keys_of_the_largest(self) -> None:
        b = TraceBuilder()
        b.inputs(2, LENGTH)
        for _ in range(2):
            b.new(8, 300, LENGTH, op="aten._softmax")
        b.new(1, 300, 300, op="aten._softmax")
        (finding,) = of(b.context(), "attention-scores")
        assert finding.title.startswith(f"Attention scores of 300 x {LENGTH} are built at model.py:1: 3 tensors,")

    @pytest.mark.parametrize(
        ("change", "is_score"),
        [
            ({}, True),
            ({"hidden": True}, False),
            ({"owner": (Role.BUFFER, "a")}, False),
            ({"phase": PhaseKind.MODEL}, False),
        ],
    )
    def test_scores_are_computed_in_a_pass_and_are_of_nobody(self, change: dict[str, object], is_score: bool) -> None:
        b = TraceBuilder()
        b.inputs(2, LENGTH)
        b.phase(change.pop("phase", PhaseKind.FORWARD))  # type: ignore[arg-type]
        b.new(2, 4, LENGTH, LENGTH, op="aten._softmax", **change)  # type: ignore[arg-type]
        assert bool(find_score_storages(b.context())) == is_score

    @pytest.mark.parametrize(("length", "is_score"), [(256, True), (255, False)])
    def test_a_context_from_256_tokens_on_has_scores(self, length: int, is_score: bool) -> None:
        """Of as many keys, and more queries."""
        made = ("_softmax", "float32", 2, 4, 300, length)
        assert self.labels(made, inputs=False, context_length=length) == ["scores" if is_score else None]

    @pytest.mark.parametrize(
        ("shape", "dtype", "is_image"),
        [
            ((2, 3, LENGTH, LENGTH), "float32", True),
            ((2, 3, LENGTH, LENGTH), "bool", False),
            ((3, LENGTH, LENGTH), "float32", False),
        ],
    )
    def test_images_that_are_given_to_a_model(self, shape: tuple[int, ...], dtype: str, is_image: bool) -> None:
        """A softmax over their columns is none over keys."""
        b = TraceBuilder()
        b.phase(PhaseKind.INPUTS)
        b.new(*shape, dtype=dtype)
        b.phase(PhaseKind.FORWARD)
        b.new(2, 4, LENGTH, LENGTH, op="aten._softmax")
        assert bool(find_score_storages(b.context())) is not is_image

    @pytest.mark.parametrize("change", [{"hidden": True}, {"phase": PhaseKind.OPTIMIZER_STEP}])
    def test_a_product_that_makes_scores_is_computed_in_a_pass(self, change: dict[str, object]) -> None:
        """Beside a linear layer as wide as the keys are many, a softmax alone tells nothing."""
        for is_product in (True, False):
            b = TraceBuilder()
            b.inputs(2, LENGTH)
            b.new(2, 4, LENGTH, LENGTH, op="aten._softmax")
            b.new(64, LENGTH, op="aten.mm")
            settings: dict[str, object] = {} if is_product else dict(change)
            b.phase(settings.pop("phase", PhaseKind.FORWARD))  # type: ignore[arg-type]
            b.new(2, 4, LENGTH * LENGTH, op="aten.mm", **settings)  # type: ignore[arg-type]
            assert bool(find_score_storages(b.context())) == is_product

    def test_features_of_as_many_as_tokens_in_each_sequence_are_no_scores(self) -> None:
        """[2 x 512 x 512] may be features of two sequences, unless a softmax makes it."""
        labels = self.labels(
            ("_softmax", "float32", 2, LENGTH, LENGTH),
            ("mul", "float32", 2, LENGTH, LENGTH),
            ("mul", "float32", 1, 2, LENGTH, LENGTH),
        )
        assert labels == ["scores", None, "scores"]

    def test_a_vocabulary_of_as_many_words_has_no_scores(self) -> None:
        made = ("_softmax", "float32", 2, 4, LENGTH, LENGTH)
        assert self.labels(made, vocab_size=LENGTH) == [None] and self.labels(made, vocab_size=100) == ["scores"]

    def test_lengths_are_those_of_the_inputs_or_of_the_context(self) -> None:
        made = ("_softmax", "float32", 2, 4, 300, LENGTH)
        assert self.labels(made, inputs=False) == [None]
        assert self.labels(made, inputs=False, context_length=LENGTH) == ["scores"]

    @pytest.mark.parametrize("has_product", [False, True])
    @pytest.mark.parametrize(
        "other",
        [
            ("mm", "float32", 64, LENGTH),  # a linear layer
            ("addmm", "float32", 64, LENGTH),
            ("convolution", "float32", 1, 3, LENGTH, LENGTH),
            ("upsample_nearest2d", "float32", 1, 3, LENGTH, LENGTH),
            ("grid_sampler_2d", "float32", 1, 3, LENGTH, LENGTH),
        ],
    )
    def test_widths_and_images_of_this_size_need_a_product(self, has_product: bool, other: tuple[object, ...]) -> None:
        """Such as a cat, which is no linear layer's."""
        made = [("_softmax", "float32", 2, 4, LENGTH, LENGTH), other]
        if has_product:
            made.append(("cat", "float32", 2, 4, LENGTH, LENGTH))
        assert self.labels(*made)[0] == ("scores" if has_product else None)

    @pytest.mark.parametrize(
        ("op", "dtype", "shape", "is_mask"),
        [
            ("le", "bool", (2, 1, LENGTH, LENGTH), True),
            ("le", "uint8", (2, 4, LENGTH, LENGTH), True),
            ("le", "int64", (2, 4, LENGTH, LENGTH), True),
            ("le", "int32", (2, 4, LENGTH, LENGTH), True),
            ("le", "int8", (2, 4, LENGTH, LENGTH), True),
            ("where", "float32", (2, 1, LENGTH, LENGTH), True),
            ("where", "float32", (2, 4, LENGTH, LENGTH), False),  # as many as heads
            ("bmm", "float32", (2, 1, LENGTH, LENGTH), False),
            ("where", "float32", (1, LENGTH, LENGTH), False),
            ("le", "bool", (1, LENGTH, LENGTH), False),  # without a head, nothing tells
            ("le", "bool", (2, 1, 300, LENGTH), False),  # no length of the inputs
            ("le", "bool", (2, 1, LENGTH, 300), False),
        ],
    )
    def test_masks_are_of_the_lengths_of_the_inputs(
        self, op: str, dtype: str, shape: tuple[int, ...], is_mask: bool
    ) -> None:
        assert self.labels((op, dtype, *shape)) == ["mask" if is_mask else None]

    def test_masks_have_the_queries_and_keys_of_scores(self) -> None:
        labels = self.labels(
            ("_softmax", "float32", 2, 4, 300, 300),
            ("le", "bool", 1, 300, 300),
            ("le", "bool", 1, 300, 301),
            ("where", "float32", 1, 1, 300, 300),
            ("_softmax", "float32", 2, 1, 300, 300),
        )
        assert labels == ["scores", "mask", None, "mask", "scores"]


class TestUpcast:
    def test_outside_norms_is_a_warning(self) -> None:
        b = training(4096, 100, layers=2)
        for layer in range(2):
            b.enter(f"layers.{layer}.mlp", "Mlp")
            b.new(1, 4096, 2048, op="aten._to_copy", line="mlp.py:7 forward")
            b.leave()
        (finding,) = of(b.context(), "float32-upcast")
        assert finding.severity is Severity.WARNING and finding.num_bytes == 2 * 32 * MIB
        assert "mlp.py:7" in finding.title
        assert finding.evidence[0].num_bytes == 32 * MIB and finding.evidence[0].module == "layers.*.mlp"

    def test_in_norms_is_a_note(self) -> None:
        b = training(4096, 100)
        b.enter("layers.0.norm", "LlamaRMSNorm", ModuleRole.NORM)
        b.new(1, 4096, 2048, op="aten._to_copy")
        b.leave()
        (finding,) = of(b.context(), "float32-upcast")
        assert finding.severity is Severity.NOTE and "own numerics" in finding.title

    def test_silent_in_a_float32_model_and_on_logits(self) -> None:
        b = training(4096, 100, dtype="float32")
        b.new(1, 4096, 2048, op="aten._to_copy")
        assert not of(b.context(), "float32-upcast")
        b = training(4096, 32000)
        head_and_loss(b, 4096, 32000)
        assert not of(b.context(vocab_size=32000), "float32-upcast")


class TestOptimizer:
    @staticmethod
    def stepped(dtype: str, state: str) -> TraceBuilder:
        b = training(16, 1000, dtype=dtype, layers=4)
        b.phase(PhaseKind.OPTIMIZER_STEP)
        for name in ("exp_avg", "exp_avg_sq"):
            b.new(2048, 512, dtype=state, op="aten.zeros_like", owner=(Role.OPTIMIZER_STATE, name))
        b.new(1, op="aten.zeros", owner=(Role.OPTIMIZER_STATE, "step"))
        return b

    def test_float32_state_of_half_parameters(self) -> None:
        (finding,) = of(self.stepped("bfloat16", "float32").context(), "float32-optimizer-state")
        assert finding.severity is Severity.NOTE and finding.num_bytes == 4 * MIB + 256

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_silent_on_state_like_the_parameters(self, dtype: str) -> None:
        assert not of(self.stepped(dtype, dtype).context(), "float32-optimizer-state")

    def test_temporaries_that_decide_the_peak(self) -> None:
        b = self.stepped("bfloat16", "bfloat16")
        roots = [b.new(2048, 16 * 512, dtype="bfloat16", op="aten._foreach_sqrt") for _ in range(4)]
        b.free(*roots)
        b.new(2048, 512, dtype="bfloat16", op="aten._foreach_mul")  # after the peak
        (finding,) = of(b.context(), "optimizer-step-temporaries")
        assert finding.num_bytes == 128 * MIB and finding.fixes[0] == "fused-optimizer"
        assert finding.severity is Severity.NOTE  # it is torch's default, and the run fits
        assert list_fix_names(finding.suggestions) == finding.fixes

    @pytest.mark.parametrize(("fewer_mib", "decides"), [(0, False), (2, True), (128, True), (150, False)])
    def test_temporaries_are_the_cause_if_the_run_fits_without(self, fewer_mib: int, decides: bool) -> None:
        """128 MiB of them, on a GPU with less than the run needs."""
        b = self.stepped("bfloat16", "bfloat16")
        for _ in range(4):
            b.new(2048, 16 * 512, dtype="bfloat16", op="aten._foreach_sqrt")
        needed_bytes = b.context().ledger.run.required_reserved_bytes
        (finding,) = of(b.context(needed_bytes - fewer_mib * MIB), "optimizer-step-temporaries")
        assert finding.is_decisive == decides == finding.title.endswith("; without them the run fits")
        assert (finding.severity is Severity.NOTE) == (fewer_mib == 0)

    @pytest.mark.parametrize(("num_steps", "decides"), [(1, True), (2, False)])
    def test_in_a_later_step_something_else_has_grown_if_memory_runs_out(self, num_steps: int, decides: bool) -> None:
        b = training(16, 1000, dtype="bfloat16", layers=4)
        for step in range(1, num_steps + 1):
            b.phase(PhaseKind.OPTIMIZER_STEP, step)
        for _ in range(4):
            b.new(2048, 16 * 512, dtype="bfloat16", op="aten._foreach_sqrt")
        b.trace.ended_out_of_memory = True
        needed_bytes = b.context().ledger.run.required_reserved_bytes
        (finding,) = of(b.context(needed_bytes - 2 * MIB), "optimizer-step-temporaries")
        assert finding.is_decisive == decides

    @pytest.mark.parametrize("op", ["aten.zeros_like", "aten.sqrt"])
    def test_state_that_the_step_is_about_to_make_is_no_temporary(self, op: str) -> None:
        b = TraceBuilder()
        b.parameter("weight", 8192, 8192)
        b.phase(PhaseKind.OPTIMIZER_STEP)
        b.new(8192, 8192, op=op)
        assert bool(of(b.context(), "optimizer-step-temporaries")) == (op == "aten.sqrt")

    def test_silent_on_little(self) -> None:
        b = self.stepped("bfloat16", "bfloat16")
        b.new(2048, 4 * 512, dtype="bfloat16", op="aten._foreach_sqrt")
        assert not of(b.context(), "optimizer-step-temporaries")

    def test_each_state_is_judged_by_its_own_parameter(self) -> None:
        b = training(16, 1000, dtype="bfloat16", layers=4)
        b.parameter("router.weight", 2048, 256)
        b.phase(PhaseKind.OPTIMIZER_STEP)
        b.new(2048, 256, op="aten.zeros_like", owner=(Role.OPTIMIZER_STATE, "exp_avg"))
        assert not of(b.context(), "float32-optimizer-state")

    def test_silent_when_the_peak_is_elsewhere(self) -> None:
        b = self.stepped("bfloat16", "bfloat16")
        b.free(b.new(2048, 512, op="aten._foreach_sqrt"))
        b.phase(PhaseKind.FORWARD, 2)
        b.new(65536, 512)
        assert not of(b.context(), "optimizer-step-temporaries")


class TestVocabulary:
    def test_rows_beyond_those_asked_for(self) -> None:
        b = training(64, 50257)
        b.phase(PhaseKind.BACKWARD)
        b.new(50257, 512, dtype="bfloat16", owner=(Role.GRADIENT, "embed.weight"))
        (finding,) = of(b.context(asked_vocab_size=1000), "vocabulary-larger-than-asked")
        assert finding.num_bytes == 2 * (49257 * 512 * 2) and finding.fixes == ("vocabulary-cap",)
        assert finding.evidence[0].shape == (50257, 512)

    @pytest.mark.parametrize("asked", [None, 50257, 50200])
    def test_silent_when_as_asked_or_padded(self, asked: int | None) -> None:
        assert not of(training(64, 50257).context(asked_vocab_size=asked), "vocabulary-larger-than-asked")

    def test_embedding_of_any_name(self) -> None:
        b = TraceBuilder()
        b.parameter("tok.weight", 50257, 512)
        b.inputs(1, 64)
        b.enter("tok", "Embedding", ModuleRole.EMBEDDING)
        b.new(1, 64, 512, op="aten.embedding")
        b.leave()
        assert of(b.context(asked_vocab_size=1000), "vocabulary-larger-than-asked")

    def test_positions_and_projections_are_no_vocabulary(self) -> None:
        b = training(64, 100)
        b.parameter("wpe.weight", 4096, 512)
        b.parameter("position_embeddings.weight", 4096, 512)
        b.parameter("layers.0.attn.head.weight", 4096, 512)
        assert not of(b.context(asked_vocab_size=100), "vocabulary-larger-than-asked")


class TestPositions:
    def test_rotary_model_is_warned_about(self) -> None:
        (finding,) = of(training(64, 100).context(context_length=8192, max_positions=4096), "beyond-positions")
        assert finding.severity is Severity.WARNING and finding.num_bytes is None

    def test_learned_positions_are_an_error(self) -> None:
        b = training(64, 100)
        b.parameter("wpe.weight", 1024, 512)
        (finding,) = of(b.context(context_length=2048, max_positions=1024), "beyond-positions")
        assert finding.severity is Severity.ERROR

    @pytest.mark.parametrize("most", [None, 8192, 9000])
    def test_silent_within(self, most: int | None) -> None:
        assert not of(training(64, 100).context(context_length=8192, max_positions=most), "beyond-positions")


class TestUnattributed:
    def test_largest_first_and_why(self) -> None:
        b = training(64, 100)
        b.phase(PhaseKind.OTHER, 0)
        b.new(1024, 1024, op="aten.empty", line=None)
        b.new(2048, 1024, op="aten.randn", line="script.py:3 <module>")
        (finding,) = of(b.context(), "unattributed")
        assert finding.num_bytes == 12 * MIB and finding.severity is Severity.NOTE
        assert finding.evidence[0].source == "script.py:3 <module>"
        assert "no line outside torch" in finding.evidence[1].text

    def test_silent_when_all_is_known(self) -> None:
        assert not of(training(64, 100).context(), "unattributed")

    def test_silent_on_what_grows(self) -> None:
        b = TraceBuilder()
        for step in range(1, 6):
            b.phase(PhaseKind.FORWARD, step)
            b.phase(PhaseKind.OPTIMIZER_STEP, step)
            b.phase(PhaseKind.OTHER, step)
            b.new(1024, 1024, op="aten.clone", line="script.py:3 <module>")
        ids = [finding.id for finding in find_all(b.context())]
        assert "memory-growth" in ids and "unattributed" not in ids


def test_errors_come_first_then_the_most_expensive() -> None:
    b = training(8192, 50000)
    head_and_loss(b, 8192, 50000)
    b.mismatch("aten.mul", "a.py:1 f", ("cpu", (4,), "a.py:2 f"), ("cuda:0", (4,), "a.py:3 f"))
    findings = find_all(b.context(GIB, vocab_size=50000, asked_vocab_size=100, context_length=8192, max_positions=64))
    errors = [finding.severity is Severity.ERROR for finding in findings]
    assert errors == sorted(errors, reverse=True) and sum(errors) == 2
    rest = [finding.num_bytes or 0 for finding in findings if finding.severity is not Severity.ERROR]
    assert len(rest) >= 3 and rest == sorted(rest, reverse=True)


@pytest.mark.parametrize("is_cause", [False, True])
def test_a_run_that_fits_without_its_cause_needs_no_other_change(
    is_cause: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    suggestion = Suggestion("bfloat16", "bfloat16", 1, True, 1)
    full = Finding("does-not-fit", Severity.ERROR, "", 1, (), ("bfloat16",), suggestions=(suggestion,))
    kept = Finding("idle-memory", Severity.WARNING, "", 2, (), (), is_decisive=is_cause)
    monkeypatch.setattr("memprof.findings.rules.RULES", {1: lambda _: [full], 2: lambda _: [kept]})
    b = TraceBuilder()
    b.new(1)
    findings = {one.id: one for one in find_all(b.context())}
    assert bool(findings["does-not-fit"].suggestions) == bool(findings["does-not-fit"].fixes) == (not is_cause)


@pytest.mark.parametrize("is_cause", [False, True])
def test_what_is_free_in_pieces_follows_what_is_kept(is_cause: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = Finding("fragmentation", Severity.WARNING, "", 2, (), (), is_decisive=True)
    kept = Finding("idle-memory", Severity.WARNING, "", 1, (), (), is_decisive=is_cause)
    monkeypatch.setattr("memprof.findings.rules.RULES", {1: lambda _: [pieces], 2: lambda _: [kept]})
    b = TraceBuilder()
    b.new(1)
    first, second = find_all(b.context())
    assert first.id == ("idle-memory" if is_cause else "fragmentation")
    assert first.is_decisive and not second.is_decisive


def test_a_search_asks_only_the_rules_that_guide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {order: Finding(str(order), Severity.NOTE, "", None, (), ()) for order in (3, 1, 2)}
    rules = {order: lambda _, own=finding: [own] for order, finding in made.items()}
    monkeypatch.setattr("memprof.findings.rules.RULES", rules)
    monkeypatch.setattr("memprof.findings.rules.SEARCH_RULES", {3, 2})
    b = TraceBuilder()
    b.new(1)
    assert [one.id for one in find_all(b.context())] == ["1", "2", "3"]
    assert [one.id for one in find_all(b.context(), for_search=True)] == ["2", "3"]


def test_results_are_computed_once_for_a_context() -> None:
    asked = []

    @cache_per_context
    def count(context: Context) -> int:
        asked.append(context)
        return len(asked)

    b = TraceBuilder()
    b.new(1)
    first, second = b.context(), b.context()
    assert [count(first), count(first), count(second), count(first)] == [1, 1, 2, 1]
