"""Learning to learn: an inner step of functional weights, and the outer gradient goes through it."""

import torch
from torch import nn
from torch.func import functional_call

model = nn.Sequential(nn.Linear(1, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1)).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(3):
    optimizer.zero_grad()
    outer = 0.0
    for _ in range(4):
        weights = dict(model.named_parameters())
        known, asked = torch.rand(10, 1, device="cuda"), torch.rand(10, 1, device="cuda")
        for _ in range(2):
            inner = nn.functional.mse_loss(functional_call(model, weights, (known,)), known.sin())
            gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            weights = {
                name: weight - 0.01 * gradient
                for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
            }
        outer = outer + nn.functional.mse_loss(functional_call(model, weights, (asked,)), asked.sin())
    outer.backward()
    optimizer.step()
