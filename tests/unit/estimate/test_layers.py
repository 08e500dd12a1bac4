"""What a layer keeps, by hand: see docs/estimate.md."""

import pytest

from memprof.estimate.geometry import build_from_model
from memprof.estimate.layers import record_layer
from memprof.estimate.projections import LayerSettings


def kept_per_token(model, **setting):
    geometry = build_from_model(model).geometry
    tape, kept = record_layer(LayerSettings(geometry, 1, 512, **{"itemsize": 2, **setting}))
    assert tape.training
    assert kept % 512 == 0
    return kept // 512


def test_llama_in_half_precision():
    h, q, kv, i, heads = 2048, 2048, 512, 8192, 32
    norm = 4 * h + 4 + 2 * h + 2 * h  # float32 copy, statistics, before its weight, result
    attention = 2 * (q + kv + kv) + 2 * q + 4 * heads  # query, key, value; output and row sums
    mlp = 4 * 2 * i  # gate, activated gate, up, product
    assert kept_per_token("llama-3.2-1b") == 2 * norm + attention + mlp


def test_a_frozen_layer_keeps_what_its_inputs_gradients_need():
    h, q, kv, i, heads, rank = 2048, 2048, 512, 8192, 32, 8
    norms = 2 * (4 * h + 4)
    adapters = 4 * h + 4 * rank + 4 * h + 4 * rank  # the norm's output in float32, for q and for v
    attention = 2 * (q + kv + kv) + 2 * q + 4 * heads
    assert (
        kept_per_token("llama-3.2-1b", trains_weights=False, lora_rank=8, lora_targets=("q", "v"))
        == norms + adapters + attention + 6 * i
    )


def test_opt_keeps_the_result_of_relu_and_dropout_masks():
    h, i, heads = 2048, 8192, 32
    norms = 2 * (2 * h + 8 + 2 * h)
    assert kept_per_token("opt-1.3b") == norms + 2 * 3 * h + 2 * h + 4 * heads + 2 * i + 2 * h


def test_grouped_heads_in_float32_make_scores():
    few, many = (
        record_layer(LayerSettings(build_from_model("llama-3.2-1b").geometry, 1, length, 4))[1] / length
        for length in (512, 1024)
    )
    assert many - few == 4 * 32 * 512


@pytest.mark.parametrize(
    "model", ["gpt2", "pythia-70m", "qwen3-0.6b", "gemma-3-1b", "phi-2", "phi-3-mini", "olmo-2-1b"]
)
def test_more_precision_and_more_trained_is_more(model):
    half = kept_per_token(model)
    assert kept_per_token(model, trains_weights=False) < half < kept_per_token(model, itemsize=4)
    assert kept_per_token(model, itemsize=4, amp=True) > half
