# Lengths of four buckets come in any order; the table of positions is grown to the longest that has come.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: 4096 positions of 16 KiB are 64 MiB, of which an older table of 48 may be left; weights and gradients 128, the
#      batch and what is made of it 4 * 64.
import random

import torch
from torch import nn


class Positions(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.table = None

    def forward(self, x):
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(len(x), device=x.device)[:, None] * torch.ones(self.width, device=x.device)
        return x + self.table[: len(x)]


random.seed(3)
net = nn.Sequential(Positions(4096), nn.Linear(4096, 4096, bias=False)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for _ in range(40):
    length = random.choice([1024, 2048, 3072, 4096])
    net(torch.randn(length, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
