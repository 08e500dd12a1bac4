"""Lengths grow with the epochs; micro-batches are gathered until they have so many tokens; a warm-up for the rate."""

import torch
from torch import nn

layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, norm_first=True)
model = nn.ModuleDict(
    {
        "embed": nn.Embedding(1000, 128),
        "blocks": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        "head": nn.Linear(128, 1000),
    }
).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
for epoch in range(3):
    length = 32 * 2**epoch
    for _ in range(3):
        tokens = torch.randint(0, 1000, (4, length + 1)).cuda()
        causal = nn.Transformer.generate_square_subsequent_mask(length, device="cuda")
        hidden = model["blocks"](model["embed"](tokens[:, :-1]), mask=causal, is_causal=True)
        loss = nn.functional.cross_entropy(model["head"](hidden).transpose(1, 2), tokens[:, 1:]) / 3
        loss.backward()
    optimizer.step()
    warm.step()
    optimizer.zero_grad()
