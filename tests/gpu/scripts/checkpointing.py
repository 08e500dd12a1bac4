"""A Qwen3 in bfloat16, with gradient checkpointing and two batches accumulated."""

import torch
from recording import record_steps
from transformers import AutoModelForCausalLM, Qwen3Config

config = Qwen3Config(
    vocab_size=32_000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, use_cache=False,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda")
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)


def step():
    for _ in range(2):
        tokens = torch.randint(0, 32_000, (2, 2048), device="cuda")
        (model(input_ids=tokens, labels=tokens).loss / 2).backward()
    optimizer.step()
    optimizer.zero_grad()


record_steps("checkpointing", step)
