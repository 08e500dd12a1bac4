"""Which model a name stands for."""

from __future__ import annotations

import pytest

from memprof.estimate.serving.lookup import load_served_model


@pytest.mark.parametrize("name", ["google/gemma-4-26B-A4B", "nvidia/Gemma-4-26B-A4B-NVFP4", "Qwen/Qwen2.5-VL-7B"])
def test_base_models_have_the_shape_of_the_tuned_one(name: str) -> None:
    model = load_served_model(name)
    assert (model.name, model.hf_id) == (name, name)
    assert bool(model.config.get("quantization_config")) is name.endswith("NVFP4")
