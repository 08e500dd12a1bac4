"""A language model of mamba.py, with its parallel scan."""

import torch
from mambapy.lm import LM
from mambapy.mamba import MambaConfig

model = LM(MambaConfig(d_model=256, n_layers=4), vocab_size=8000).cuda()
optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cuda")
for _ in range(3):
    tokens = torch.randint(0, 8000, (4, 257), device="cuda")
    with torch.amp.autocast("cuda", dtype=torch.bfloat16):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), tokens[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
