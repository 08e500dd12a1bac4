"""nanochat's model with its Muon and AdamW, two micro-batches a step."""

import torch
from nanochat.gpt import GPT, GPTConfig

config = GPTConfig(sequence_len=1024, vocab_size=32_768, n_layer=6, n_head=6, n_kv_head=6, n_embd=384)
with torch.device("meta"):
    model = GPT(config)
model.to_empty(device="cuda")
model.init_weights()
optimizer = model.setup_optimizer()
for _ in range(3):
    for _ in range(2):
        tokens = torch.randint(0, 32_768, (4, 1025), device="cuda")
        loss = model(tokens[:, :-1], tokens[:, 1:].contiguous())
        (loss / 2).backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)
