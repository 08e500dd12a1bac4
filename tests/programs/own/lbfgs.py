"""LBFGS calls its closure several times a step."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)).cuda()
rows = torch.randn(512, 64).cuda()
wanted = rows[:, :1].sin()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=5, history_size=4)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(rows), wanted)
    loss.backward()
    return loss


for step in range(3):
    loss = optimizer.step(closure)
    print(step, loss.item())
    with torch.no_grad():
        ahead = model(rows[:16])
