"""Generation: what is skipped between the first and the last tokens changes no figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memprof.flows import profile as flow
from memprof.report.documents.report import Report
from memprof.spec import Mode, TargetSpec
from memprof.workload import generate

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "architectures": ["LlamaForCausalLM"],
}


def run(tmp_path: Path, prompt: int, new_tokens: int, **config: object) -> Report:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**TINY, **config}))
    spec = TargetSpec(
        model=str(file),
        mode=Mode.INFERENCE,
        context_length=prompt,
        new_tokens=new_tokens,
        batch_size=2,
        steps=1,
        gpu="a100-80gb",
    )
    return flow.profile(spec)[1]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, marks=pytest.mark.nightly, id="full"),
        pytest.param(
            {
                "model_type": "mistral",
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 24,
            },
            id="sliding",
        ),
    ],
)
def test_skipping_alike_steps_changes_no_figure(tmp_path, monkeypatch, config):
    skipping = run(tmp_path, 16, 60, **config)
    assert any("were not all run" in sentence for sentence in skipping.assumptions)
    monkeypatch.setattr(generate, "EDGE_STEPS", 1000)
    whole = run(tmp_path, 16, 60, **config)
    assert not any("were not all run" in sentence for sentence in whole.assumptions)
    decode = [next(row for row in document.stages if row.name == "decode") for document in (skipping, whole)]
    assert decode[0].peak_allocated_bytes == decode[1].peak_allocated_bytes
    assert decode[0].allocated_bytes == decode[1].allocated_bytes
    assert skipping.peak.categories["KV cache"] == whole.peak.categories["KV cache"]


def test_the_cache_has_its_true_size(tmp_path):
    document = run(tmp_path, 2, 300)
    assert document.peak.stage == "decode"
    # Layers x keys and values x batch x heads x tokens (the last is never fed back) x head size x 4 bytes.
    cache = 3 * 2 * 2 * 2 * 301 * 16 * 4
    # While a layer's keys or values grow, the old ones are there too.
    step = 2 * 2 * 301 * 16 * 4
    assert cache - step <= document.peak.categories["KV cache"] <= cache + step + 3 * 2 * 512


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "state_size": 4},
        pytest.param(
            {"model_type": "rwkv", "architectures": ["RwkvForCausalLM"], "attention_hidden_size": 64},
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["Mamba", "RWKV"],
)
def test_a_state_of_one_size_is_kept_from_token_to_token(tmp_path, monkeypatch, config):
    short = run(tmp_path, 8, 2, **config)
    skipping = run(tmp_path, 8, 30, **config)
    assert any("one size" in sentence for sentence in skipping.assumptions)
    monkeypatch.setattr(generate, "EDGE_STEPS", 1000)
    whole = run(tmp_path, 8, 30, **config)
    assert not any("one size" in sentence for sentence in whole.assumptions)
    rows = [next(row for row in one.stages if row.name == "decode") for one in (skipping, whole)]
    assert rows[0].peak_allocated_bytes == rows[1].peak_allocated_bytes
    assert skipping.peak.categories["KV cache"] == whole.peak.categories["KV cache"] > 0
    assert short.peak.categories["KV cache"] <= whole.peak.categories["KV cache"]


def test_a_state_has_its_true_size(tmp_path):
    document = run(tmp_path, 2, 12, model_type="mamba", architectures=["MambaForCausalLM"], state_size=64)
    # Layers x batch x inner width x (the convolution's columns and the state's) x 4 bytes.
    state = 3 * 2 * 128 * (4 + 64) * 4
    of_one_layer = 2 * 128 * 64 * 4
    assert state - of_one_layer <= document.peak.categories["KV cache"] <= state + of_one_layer + 3 * 2 * 512
