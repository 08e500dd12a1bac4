"""A Llama in bfloat16, with AdamW and clipped gradients."""

import torch
from recording import record_steps
from transformers import AutoModelForCausalLM, LlamaConfig

config = LlamaConfig(
    vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
    num_key_value_heads=4, use_cache=False,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)


def step():
    tokens = torch.randint(0, 32_000, (4, 1024)).to("cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


record_steps("llama", step)
