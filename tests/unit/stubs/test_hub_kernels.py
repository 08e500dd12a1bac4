"""Kernels that transformers fetches from the hub: a script's own from_pretrained runs with what stands in for them."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.stubs.extension import extensions
from memprof.stubs.hub_kernels import HubKernels
from memprof.virtual import VirtualGpu

fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
pytestmark = pytest.mark.skipif(not hasattr(fp8, "FineGrainedFP8"), reason="this transformers has no such kernels")


def test_a_transformers_with_other_kernels_is_left_alone():
    module = ModuleType("transformers.integrations.finegrained_fp8")  # as 5.8 has it
    module.FineGrainedFP8 = lambda fp8_matmul, fp8_act_quant, batched_fp8_matmul, grouped_fp8_matmul: None  # type: ignore[attr-defined]
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        assert list(HubKernels().make_module_patches(module, gpu._context)) == []


def saved(folder):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=128, vocab_size=512, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    state = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if name.endswith("proj.weight"):
            state[name] = tensor.to(torch.float8_e4m3fn)
            rows, columns = (-(-size // 128) for size in tensor.shape)
            state[f"{name}_scale_inv"] = torch.ones(rows, columns)
        else:
            state[name] = tensor
    from safetensors.torch import save_file

    config.quantization_config = block
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(-(-tensor.nbytes // 512) * 512 for tensor in state.values())


def test_a_float8_checkpoint_is_loaded_and_run_as_it_is_stored(tmp_path):
    from transformers import AutoModelForCausalLM

    stored = saved(tmp_path)
    before = fp8._FINEGRAINED_FP8, fp8.load_finegrained_fp8_kernel
    with VirtualGpu(find_gpu("h100-80gb"), extensions=extensions()) as gpu, torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cuda:0"})
        assert torch.cuda.memory_allocated() - stored <= 2048  # beside the weights, rotary frequencies
        assert model.model.layers[0].mlp.up_proj.weight.dtype is torch.float8_e4m3fn
        logits = model(torch.ones(1, 8, dtype=torch.long, device="cuda")).logits
        assert logits.shape == (1, 8, 512) and logits.dtype is torch.bfloat16
    assert any("finegrained-fp8" in sentence for sentence in gpu.trace.assumptions)
    assert (fp8._FINEGRAINED_FP8, fp8.load_finegrained_fp8_kernel) == before


def test_one_scale_for_a_whole_weight_quantizes_rows_before(tmp_path):
    """A row's scale is four bytes, and its numbers take one each, until the product is there."""
    with VirtualGpu(find_gpu("h100-80gb"), extensions=extensions()):
        kernel = fp8.load_finegrained_fp8_kernel()
        x = torch.empty(64, 4096, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(1024, 4096, dtype=torch.float8_e4m3fn, device="cuda")
        scale = torch.ones((), device="cuda")
        peaks = {}
        for block in (None, [128, 128]):
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            result = kernel.matmul(x, weight, scale, block, torch.bfloat16)
            assert result.shape == (64, 1024)
            peaks[str(block)] = torch.cuda.max_memory_allocated() - held
            del result
        assert peaks["[128, 128]"] == 64 * 1024 * 2
        assert peaks["None"] == 64 * 1024 * 2 + 64 * 4096 + 4 * 64
