"""A Llama in bfloat16 that generates 24 tokens for four prompts, with a cache that grows."""

import torch
from recording import record_steps
from transformers import AutoModelForCausalLM, LlamaConfig

config = LlamaConfig(
    vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
    num_key_value_heads=4,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda").eval()


def step():
    prompt = torch.randint(3, 32_000, (4, 512), device="cuda")
    mask = torch.ones_like(prompt)
    model.generate(prompt, attention_mask=mask, max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0)


record_steps("generate", step)
