"""GPT-2 in float16 autocast, with a scaled loss and fused AdamW."""

import torch
from recording import record_steps
from transformers import AutoModelForCausalLM, GPT2Config

model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=6, use_cache=False)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
scaler = torch.amp.GradScaler()


def step():
    tokens = torch.randint(0, 50_257, (4, 512), device="cuda")
    with torch.autocast("cuda", torch.float16):
        loss = model(input_ids=tokens, labels=tokens).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


record_steps("gpt2_amp", step)
