"""transformers: attention by the name of a package that is not installed."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.import_utils import is_flash_attn_2_available

from memprof.device.catalog import find_gpu
from memprof.stubs.extension import StubExtension
from memprof.virtual import VirtualGpu

GPU = find_gpu("h100-80gb")


def llama(attention: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=attention, dtype=torch.bfloat16,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).cuda()


@pytest.mark.parametrize(("attention", "package"), [
    ("flash_attention_2", "flash_attn"), ("flash_attention_3", "flash_attn_interface"),
])  # fmt: skip
def test_a_model_that_asks_for_it_by_name(attention: str, package: str) -> None:
    with VirtualGpu(GPU, extensions=[StubExtension()]) as gpu:
        assert not is_flash_attn_2_available()
        model = llama(attention)
        assert model.config._attn_implementation == attention
        ids = torch.zeros(2, 32, dtype=torch.int64, device="cuda")
        mask = torch.ones_like(ids)
        mask[0, :8] = 0
        model(input_ids=ids, labels=ids).loss.backward()
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    assert any(line.startswith(f"{package} is not installed") for line in gpu.trace.assumptions)
    assert not is_flash_attn_2_available()


def test_it_is_asked_for_without() -> None:
    with VirtualGpu(GPU), pytest.raises(ImportError, match="FlashAttention2"):
        llama("flash_attention_2")


def test_a_model_that_does_not_ask_runs_without() -> None:
    with VirtualGpu(GPU, extensions=[StubExtension()]) as gpu:
        llama("sdpa")
    assert not any(" a stub" in line for line in gpu.trace.assumptions)
