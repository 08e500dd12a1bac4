"""Layers whose forward is called directly, each with an optimizer of its own (forward-forward)."""

import torch
from torch import nn


class Layer(nn.Linear):
    def __init__(self, before, after):
        super().__init__(before, after)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.03)

    def forward(self, rows):
        return torch.relu(rows @ self.weight.T + self.bias)

    def learn(self, good, bad):
        loss = torch.log1p(torch.exp(2 - self.forward(good).pow(2).mean(1))).mean()
        loss = loss + torch.log1p(torch.exp(self.forward(bad).pow(2).mean(1) - 2)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return self.forward(good).detach(), self.forward(bad).detach()


layers = [Layer(784, 1024).cuda(), Layer(1024, 1024).cuda()]
for _ in range(2):
    good, bad = torch.randn(64, 784).cuda(), torch.randn(64, 784).cuda()
    for layer in layers:
        good, bad = layer.learn(good, bad)
