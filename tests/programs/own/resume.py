"""A checkpoint is written, and read again onto the GPU; training goes on."""

import torch
from torch import nn


def made():
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model, optimizer):
    loss = nn.functional.mse_loss(model(torch.randn(64, 512).cuda()), torch.randn(64, 512).cuda())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.item()


model, optimizer = made()
best = step(model, optimizer)
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "best": best}, "checkpoint.pt")
del model, optimizer
model, optimizer = made()
checkpoint = torch.load("checkpoint.pt", map_location="cpu", weights_only=False)
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
for _ in range(3):
    best = min(best, step(model, optimizer))
print(best == checkpoint["best"])
