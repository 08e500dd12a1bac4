"""A Wasserstein critic with a gradient penalty: a gradient of a gradient."""

import torch
from torch import nn

critic = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64 * 32 * 32, 1)).cuda()
optimizer = torch.optim.RMSprop(critic.parameters(), 5e-5)
for _ in range(3):
    real, fake = torch.randn(16, 3, 64, 64).cuda(), torch.randn(16, 3, 64, 64).cuda()
    between = torch.rand(16, 1, 1, 1, device="cuda")
    mixed = (between * real + (1 - between) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    penalty = ((gradient.flatten(1).norm(dim=1) - 1) ** 2).mean()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
