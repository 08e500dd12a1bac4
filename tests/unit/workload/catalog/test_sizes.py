"""Sizes by name: published ones where there is one, else a Llama shape within 2%."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.errors import UsageError
from memprof.workload.catalog import find_model, resolve_size, synthesize
from memprof.workload.catalog.sizes import LARGEST, PUBLISHED_SIZES, SMALLEST
from tests.lanes import examples

NAMED = [
    ("70M", "pythia-70m"),
    ("124M", "gpt2"),
    ("160m", "pythia-160m"),
    ("410M", "pythia-410m"),
    ("0.5B", "qwen2.5-0.5b"),
    ("0.6B", "qwen3-0.6b"),
    ("600M", "qwen3-0.6b"),
    ("600000000", "qwen3-0.6b"),
    ("1B", "llama-3.2-1b"),
    ("1.5B", "qwen2.5-1.5b"),
    ("1.7B", "qwen3-1.7b"),
    ("3b", "llama-3.2-3b"),
    ("4B", "qwen3-4b"),
    ("7B", "llama-2-7b"),
    ("8B", "llama-3.1-8b"),
    ("13B", "llama-2-13b"),
    ("14B", "qwen3-14b"),
    ("32B", "qwen3-32b"),
    ("70B", "llama-3.1-70b"),
    ("405B", "llama-3.1-405b"),
]


def test_a_size_that_people_name_is_a_published_model() -> None:
    for size, key in NAMED:
        entry = resolve_size(size)
        assert entry.key == key
        assert not entry.synthesized


def test_a_published_size_is_near_its_name() -> None:
    for count, key in PUBLISHED_SIZES.items():
        # "1B" is Llama 3.2 1B, which has 1.24B; no other is off by more than 8%.
        assert abs(find_model(key).num_parameters / count - 1) < (0.24 if key == "llama-3.2-1b" else 0.08)


@settings(max_examples=examples(300), deadline=None)
@given(st.floats(math.log(SMALLEST), math.log(LARGEST)).map(lambda power: round(math.exp(power))))
def test_any_size_is_met_within_two_percent(count: int) -> None:
    count = min(max(count, SMALLEST), LARGEST)
    entry = synthesize(count)
    assert abs(entry.num_parameters / count - 1) < 0.02
    config = entry.load_config()
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    assert heads * config["head_dim"] == hidden
    assert heads % kv_heads == 0
    assert entry.vocab_size == config["vocab_size"]
    if count >= 10**9:
        assert 70 < hidden / config["num_hidden_layers"] < 190
        assert 2 < config["intermediate_size"] / hidden < 5
        assert config["intermediate_size"] % 128 == 0
        assert kv_heads <= 8


@pytest.mark.parametrize("size", ["100K", "1M", "20M", "350M", "1.2B", "2.7B", "6.5B", "20B", "180B", "1T", "2T"])
def test_the_closed_form_is_what_transformers_builds(size: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    entry = resolve_size(size)
    assert entry.synthesized
    config = entry.load_config()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.AutoConfig.for_model(config.pop("model_type"), **config))
    assert sum(parameter.numel() for parameter in model.parameters()) == entry.num_parameters


def test_a_synthesised_model_says_so() -> None:
    entry = resolve_size("1.2B")
    assert entry.key == "llama-shaped-1.2b"
    assert entry.synthesized
    assert entry.hf_id == ""
    assert "1.2B" in entry.note
    assert f"{entry.num_parameters:,}" in entry.note
    assert resolve_size("1200m") == entry


def test_the_shape_near_8b_looks_like_llama_8b() -> None:
    """Asked for the size of Llama 3.1 8B, the rules find its width, its heads and nearly its depth."""
    config = synthesize(8_030_261_248).load_config()
    assert config["hidden_size"] == pytest.approx(4096, rel=0.15)
    assert config["num_hidden_layers"] == pytest.approx(32, rel=0.15)
    assert config["num_key_value_heads"] in (4, 8)
    assert config["intermediate_size"] / config["hidden_size"] == pytest.approx(3.5, rel=0.15)


def test_a_configuration_may_be_changed() -> None:
    resolve_size("1.2B").load_config()["hidden_size"] = 0
    assert resolve_size("1.2B").load_config()["hidden_size"] > 0


@pytest.mark.parametrize("size", ["10K", "99999", "3T", "", "big", "0", "-1B"])
def test_what_cannot_be_made_is_an_error(size: str) -> None:
    with pytest.raises(UsageError):
        resolve_size(size)
