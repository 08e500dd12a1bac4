"""What a model leaves to chance: the same in every run, and nothing that the caller draws afterwards is changed."""

from __future__ import annotations

import json
import random

import numpy
import pytest
import torch

import memprof
from memprof.workload.rng import NormalsInSinglePrecision, preserve_rng_state, seed_rngs

DROPS_LAYERS = {
    "model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"], "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 9, "num_attention_heads": 2, "conv_dim": [8, 8], "conv_stride": [5, 4],
    "conv_kernel": [10, 4], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "layerdrop": 0.4, "vocab_size": 32,
}  # fmt: skip


def drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(numpy.random.random())


def test_it_begins_at_the_same_number_and_leaves_no_trace() -> None:
    # Tests that run a workload without a capture around it leave the generators where they begin.
    torch.default_generator.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    before = torch.default_generator.get_state(), random.getstate(), numpy.random.get_state()
    with preserve_rng_state():
        seed_rngs()
        one = drawn()
    after = drawn()
    torch.default_generator.set_state(before[0])
    random.setstate(before[1])
    numpy.random.set_state(before[2])
    assert drawn() == after != one
    with preserve_rng_state():
        seed_rngs()
        assert drawn() == one


def test_layers_that_are_dropped_are_the_same_in_every_run(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DROPS_LAYERS))
    spec = memprof.TargetSpec(model=str(tmp_path), steps=2)
    first, _ = memprof.profile(spec)
    torch.rand(7)
    second, _ = memprof.profile(spec)
    assert second.events == first.events and second.storages == first.storages
    called = [event.ref for event in first.events if event.kind.name == "ENTER"]
    layers = [at for at, module in enumerate(first.modules) if module.role.name == "LAYER"]
    assert any(called.count(layer) < 2 for layer in layers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_drawn_as_float32_is(dtype: torch.dtype) -> None:
    weight = torch.empty(64, 64, dtype=dtype)
    with preserve_rng_state(), NormalsInSinglePrecision():
        seed_rngs()
        torch.nn.init.normal_(weight, std=0.5)
        other = torch.empty_like(weight).normal_(0.0, 0.5)
        single = torch.empty(64, 64).normal_()
    with preserve_rng_state():
        seed_rngs()
        expected = torch.empty(64 * 64).normal_(std=0.5).view(64, 64)
        again = torch.empty(64 * 64).normal_(std=0.5).view(64, 64)
        assert torch.equal(weight, expected.to(dtype)) and torch.equal(other, again.to(dtype))
        assert torch.equal(single, torch.empty(64, 64).normal_())
