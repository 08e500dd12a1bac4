"""Attention scores and masks: which tensors are, and when they are told of."""

from __future__ import annotations

import pytest

from memprof.findings.attention_scores import find_score_storages
from memprof.trace.events import PhaseKind, Role
from memprof.units import GIB
from tests.unit.findings.language_models import of, training
from tests.unit.traces import TraceBuilder


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
