"""Which model a name stands for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memprof.estimate.serving.lookup import load_served_model
from memprof.estimate.serving.unquantized import compute_kept_shares, list_published_exceptions
from memprof.estimate.serving.weights import find_weight_format
from tests.unit.estimate.serving.test_weights import LLAMA


@pytest.mark.parametrize("name", ["google/gemma-4-26B-A4B", "nvidia/Gemma-4-26B-A4B-NVFP4", "Qwen/Qwen2.5-VL-7B"])
def test_base_models_have_the_shape_of_the_tuned_one(name: str) -> None:
    model = load_served_model(name)
    assert (model.name, model.hf_id) == (name, name)
    assert bool(model.config.get("quantization_config")) is name.endswith("NVFP4")


COMPRESSED = "-FP8-dynamic -quantized.w8a8 -w8a8 -quantized.w4a16 -w4a16 -NVFP4 -FP4"
FORMATS = {
    "fp8": "-FP8-dynamic -fp8", "int8": "-quantized.w8a8 -W8A8", "awq": "-AWQ -AWQ-INT4 -awq-4bit",
    "gptq": "-quantized.w4a16 -W4A16 -GPTQ -GPTQ-Int4", "gptq8": "-GPTQ-Int8", "nvfp4": "-NVFP4 -FP4",
    "bitsandbytes": "-bnb-4bit",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "ending"), [(name, one) for name, endings in FORMATS.items() for one in endings.split()]
)
def test_the_ending_of_a_name_is_its_format(name: str, ending: str) -> None:
    model = load_served_model(f"someone/Qwen3-8B{ending}")
    found = find_weight_format(model, None)
    assert found is not None and found.name == name
    assert (model.name, model.geometry.layers) == (f"someone/Qwen3-8B{ending}", 36)
    exceptions = list_published_exceptions(model.name, ending.lower(), has_experts=False)
    assert bool(exceptions) is (ending.lower() in COMPRESSED.lower().split())


@pytest.mark.parametrize(
    "ending", ["-Instruct", "-it", "-Chat", "-Base", "-pt", "-Instruct-2507", "-Thinking-2507", "-hf"]
)
def test_tuned_models_have_the_shape_of_their_base(ending: str) -> None:
    model = load_served_model(f"someone/Qwen3-8B-{ending}")
    assert (model.geometry.layers, model.hf_id, model.num_parameters) == (36, f"someone/Qwen3-8B-{ending}", None)


def test_a_size_a_file_and_a_name_of_the_catalog(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for path in (tmp_path, tmp_path / "config.json"):
        model = load_served_model(str(path))
        assert (model.name, model.hf_id, model.geometry.hidden) == (tmp_path.name, str(tmp_path), 256)
    assert load_served_model("8B", is_size=True).geometry.layers > 20
    named = load_served_model("qwen3-8b")
    assert (named.name, named.hf_id, named.num_parameters) == ("qwen3-8b", "Qwen/Qwen3-8B", 8_190_735_360)


MATRICES = {
    "attention": "self_attn.o_proj", "state": "linear_attn.out_proj mixer.out_proj mamba.out_proj",
    "mlp": "mlp.down_proj feed_forward.down_proj",
    "experts": "mlp.experts.0.down_proj experts.0.down_proj block_sparse_moe.experts.0.w2",
    "shared expert": "mlp.shared_expert.down_proj mlp.shared_experts.down_proj",
}  # fmt: skip


@pytest.mark.parametrize("block", MATRICES)
def test_names_of_a_block_that_is_not_quantized(block: str) -> None:
    for matrix in MATRICES[block].split():
        for prefix in ("model", "model.language_model", "language_model.model", "backbone"):
            name = f"{prefix}.layers.1.{matrix}"
            assert compute_kept_shares({"exclude_modules": [name]}, 4)[block] == 0.25


@pytest.mark.parametrize(
    ("size", "name", "hf_id"),
    [
        ("8B", "llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("1.2B", "llama-shaped-1.2b", "llama-shaped-1.2b"),  # published nowhere
    ],
)
def test_a_size_has_the_name_of_its_model(size: str, name: str, hf_id: str) -> None:
    model = load_served_model(size, is_size=True)
    assert (model.name, model.hf_id) == (name, hf_id)
