# Leaves with 0 when it has made its steps, out of a function far down.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: weights and gradients of 16 MiB, and activations of 1.
import sys

import torch
from torch import nn


class Loop:
    def __init__(self, max_steps):
        self.model = nn.Linear(2048, 2048).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.left = max_steps

    def step(self):
        self.model(torch.randn(64, 2048, device="cuda")).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.left -= 1
        if not self.left:
            sys.exit(0)


loop = Loop(6)
while True:
    loop.step()
