"""transformers' own `generate` with layers repeated, against the same with every layer run."""

import dataclasses

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from memprof.catalog import find_gpu
from memprof.trace.events import PhaseKind
from memprof.virtual import VirtualGpu

LAYERS, TOKENS = 9, 6
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "head_dim": 16,
}  # fmt: skip


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def gemma():
    """Of layers with a window, which is full after the first tokens, and without."""
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=16))


def gpt():
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=LAYERS, n_head=4, vocab_size=512))


def t5():
    sizes = {"d_model": 64, "d_ff": 128, "num_layers": LAYERS, "num_heads": 4, "d_kv": 16, "vocab_size": 512}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def generated(make, way, *, repeats):
    torch.manual_seed(0)
    device = VirtualGpu(find_gpu("h100-80gb"), compiles=False, repeats=repeats)
    with device:
        with device.phase(PhaseKind.MODEL):
            model = make().eval().to("cuda")
        device.adopt(model)
        with device.phase(PhaseKind.FORWARD, 1), torch.no_grad():
            prompt = torch.arange(5, 29, device="cuda").reshape(2, 12)
            model.generate(input_ids=prompt, max_new_tokens=TOKENS, pad_token_id=0, **way)
        del prompt
        if repeats:
            device.repeats.settle()
        del model
    return device.trace, device.repeats.times if repeats else 0


@pytest.mark.parametrize(
    ("make", "way", "times"),
    [
        (llama, {}, TOKENS * (LAYERS - 3)),
        (llama, {"num_beams": 3, "num_return_sequences": 2}, TOKENS * (LAYERS - 3)),
        (llama, {"do_sample": True, "top_k": 5}, TOKENS * (LAYERS - 3)),
        (llama, {"use_cache": False}, TOKENS * (LAYERS - 3)),
        (llama, {"cache_implementation": "static"}, 0),
        (llama, {"cache_implementation": "offloaded"}, 0),
        (gemma, {}, TOKENS * (LAYERS - 5)),
        (gemma, {"num_beams": 2}, TOKENS * (LAYERS - 5)),
        (gpt, {}, TOKENS * (LAYERS - 3)),
        (t5, {}, 0),
    ],
    ids=[
        *("Llama", "Llama, beams", "Llama, drawn", "Llama, no cache", "Llama, static", "Llama, offloaded"),
        *("Gemma 2", "Gemma 2, beams", "GPT-2", "T5"),
    ],
)
def test_a_text_is_generated_as_ever(make, way, times):
    run, _ = generated(make, way, repeats=False)
    trace, repeated = generated(make, way, repeats=True)
    for field in dataclasses.fields(run):
        assert getattr(trace, field.name) == getattr(run, field.name), field.name
    assert repeated == times
