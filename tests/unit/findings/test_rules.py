"""Each rule on hand-written traces: where it must speak, and where it must not."""

from __future__ import annotations

import pytest

from memprof.findings import Context, Finding, Severity, Suggestion, find_all
from memprof.findings.finding import cache_per_context
from memprof.spec import Mode, TargetSpec
from memprof.trace.events import ModuleRole, PhaseKind, Role
from memprof.units import GIB, MIB
from tests.unit.findings.language_models import head_and_loss, of, training
from tests.unit.traces import TraceBuilder


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
    def test_silent_when_nothing_was_refused(self) -> None:
        assert not of(training(4096, 1000).context(GIB), "out-of-memory-caught")


class TestLogits:
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

    @pytest.mark.parametrize("has_loss", [True, False])
    def test_the_log_softmax_is_one_of_the_logits_that_are_live(self, has_loss: bool) -> None:
        """Not of a call before, as of the step before an evaluation, whose logits are gone."""
        b = training(8192, 50000)
        b.free(b.new(4096, 50000, line="model.py:30 forward"))
        b.free(b.new(4096, 50000, op="aten._log_softmax", line="loss.py:2 loss"))
        b.new(8192, 50000, line="model.py:30 forward")
        if has_loss:
            b.new(8192, 50000, op="aten._log_softmax", line="loss.py:6 loss")
        (finding,) = of(b.context(vocab_size=50000), "logits-explosion")
        loss = ", with a log_softmax at loss.py:6" * has_loss
        assert finding.title.endswith(f" of [8192 x 50000], made at model.py:30{loss}")

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


class TestUpcast:
    def test_silent_in_a_float32_model_and_on_logits(self) -> None:
        b = training(4096, 100, dtype="float32")
        b.new(1, 4096, 2048, op="aten._to_copy")
        assert not of(b.context(), "float32-upcast")
        b = training(4096, 32000)
        head_and_loss(b, 4096, 32000)
        assert not of(b.context(vocab_size=32000), "float32-upcast")


class TestVocabulary:
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

    @pytest.mark.parametrize("most", [None, 8192, 9000])
    def test_silent_within(self, most: int | None) -> None:
        assert not of(training(64, 100).context(context_length=8192, max_positions=most), "beyond-positions")


class TestUnattributed:
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


@pytest.mark.parametrize(("kept_mib", "is_cause", "follows"), [(24, True, False), (25, True, True), (25, False, False)])
@pytest.mark.parametrize("batch", ["larger-batch", "evaluation-batch", "later-step"])
def test_a_large_batch_follows_what_is_kept_in_vain_from_a_quarter_of_the_peak_on(
    batch: str, kept_mib: int, is_cause: bool, follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = Finding(batch, Severity.WARNING, "", 90 * MIB, (), (), is_decisive=True)
    kept = Finding("idle-memory", Severity.WARNING, "", kept_mib * MIB, (), (), is_decisive=is_cause)
    monkeypatch.setattr("memprof.findings.rules.RULES", {1: lambda _: [large], 2: lambda _: [kept]})
    b = TraceBuilder()
    b.alloc(100 * MIB)
    first, second = find_all(b.context())
    assert [first.id, second.id] == (["idle-memory", batch] if follows else [batch, "idle-memory"])
    assert second.is_decisive == (is_cause and not follows)
