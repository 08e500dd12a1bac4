"""A matrix of weights for each token, and what only has its sizes."""

from __future__ import annotations

import pytest

from memprof.findings.weight_delta import _find_matrices_per_token
from memprof.spec import TargetSpec
from memprof.trace.events import PhaseKind, Role
from tests.unit.findings.language_models import of
from tests.unit.traces import TraceBuilder


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
