# pytorch/pytorch#4661: backward(create_graph=True) leaves each input in a cycle with its own gradient.
# resolved: torch.autograd.grad instead, or .grad = None after use.
# run: --gpu rtx-3060-12gb
# first: memory-growth
# fix: autograd.grad | .grad = None
import torch
from torch import nn

critic = nn.Sequential(nn.Linear(4096, 2048), nn.Tanh(), nn.Linear(2048, 1)).cuda()
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4)


def penalize(real):
    x = real.clone().requires_grad_(True)
    critic(x).sum().backward(create_graph=True)  # <- cause
    return (x.grad.norm(2, dim=1) - 1).square().mean()


for _ in range(40):
    real = torch.randn(2048, 4096, device="cuda")
    penalty = penalize(real)
    optimizer.zero_grad()
    penalty.backward()
    optimizer.step()
