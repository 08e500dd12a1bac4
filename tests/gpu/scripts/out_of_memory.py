"""Keeps every result until the GPU is full."""

import torch

layer = torch.nn.Linear(64, 64).cuda()
kept = []
while True:
    kept.append(layer(torch.randn(1 << 24, 64, device="cuda")))
