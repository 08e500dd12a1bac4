"""Published peaks of a model that transformers spreads over several GPUs (`device_map="auto"`).

Qwen2.5's speed benchmark of the 72B model in bfloat16 on A100 80GB: the script (QwenLM/Qwen2.5,
examples/speed-benchmark/speed_benchmark_transformers.py) sums torch.cuda.max_memory_allocated over the GPUs; the
figures are of docs/source/benchmark/speed_benchmark.rst at a912d23 (torch 2.3.1, transformers 4.46.0), in GiB. The
2,048 tokens are not decoded one by one here: after the prompt the cache is made as long as it is for the last of them.
"""

from __future__ import annotations

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.flows.gpus import RunAllocator, resolve_settings
from memprof.virtual import VirtualGpu

NEW_TOKENS = 2048
GIB = 1 << 30
# Tokens of the prompt, GPUs, published GiB, and how far off. With a prompt of one token, decoding is the peak, whose
# cache grew token by token into blocks that are up to 1 MiB larger: 160 of them.
ROWS = [(1, 2, 136.20, 0.002), (6144, 2, 140.00, 0.0005), (14_336, 3, 149.14, 0.0005), (30_720, 3, 164.79, 0.0005)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model as a checkpoint without weights, which a virtual GPU writes and reads."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        hidden_size=8192, intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=152_064, max_position_embeddings=32_768, tie_word_embeddings=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("qwen")
    with run_of(1):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def run_of(gpus: int) -> VirtualGpu:
    gpu, settings = find_gpu("a100-80gb"), resolve_settings(None)
    return VirtualGpu(gpu, gpus=gpus, memory=lambda trace: RunAllocator(trace, gpu, settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "gpus", "published", "tolerance"),
    [pytest.param(*row, marks=() if row is ROWS[-1] else pytest.mark.nightly) for row in ROWS],
)
def test_generation_spread_over_gpus(folder, prompt, gpus, published, tolerance):
    from transformers import AutoModelForCausalLM, DynamicCache

    with run_of(gpus), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map="auto").eval()
        assert {parameter.get_device() for parameter in model.parameters()} == set(range(gpus))
        tokens = torch.randint(3, 1000, (1, prompt)).to(model.device)
        cache = DynamicCache(config=model.config)
        model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        for layer in cache.layers:
            layer.keys = longer(layer.keys)
            layer.values = longer(layer.values)
        model(input_ids=tokens[:, :1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        simulated = sum(torch.cuda.max_memory_allocated(index) for index in range(gpus)) / GIB
    assert simulated == pytest.approx(published, rel=tolerance)


def longer(kept: torch.Tensor) -> torch.Tensor:
    return torch.cat([kept, kept.new_empty(*kept.shape[:2], NEW_TOKENS - 1, kept.shape[-1])], dim=-2)
