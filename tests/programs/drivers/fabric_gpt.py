"""A GPT of litgpt, trained with Lightning's Fabric as its pretrain.py does."""

import lightning as L
import torch
from litgpt.model import GPT, Config
from litgpt.utils import chunked_cross_entropy

fabric = L.Fabric(devices=1, precision="bf16-true")
fabric.launch()
with fabric.init_module(empty_init=True):
    model = GPT(Config.from_name("pythia-70m"))
model = fabric.setup(model)
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
for step in range(4):
    tokens = fabric.to_device(torch.randint(0, 50_000, (4, 513)))
    with fabric.no_backward_sync(model, enabled=step % 2 == 0):
        loss = chunked_cross_entropy(model(tokens[:, :-1].contiguous()), tokens[:, 1:].contiguous(), chunk_size=0)
        fabric.backward(loss / 2)
    if step % 2:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
