"""Four layers of a transformer under torch.compile."""

import torch
from recording import record_steps
from torch import nn


class Layer(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 8, batch_first=True)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, states):
        normed = self.norm(states)
        states = states + self.attention(normed, normed, normed, need_weights=False)[0]
        return states + self.perceptron(states)


model = nn.Sequential(*(Layer() for _ in range(4))).to("cuda")
compiled = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters())


def step():
    compiled(torch.randn(8, 512, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


record_steps("compiled", step)
