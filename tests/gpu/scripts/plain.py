"""A perceptron that is trained for three steps, and records nothing itself."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    batch = torch.randn(512, 1024, device="cuda")
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
