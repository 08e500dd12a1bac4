# A replay buffer of thirty entries, in which new ones take the place of old ones.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: thirty states of 32 MiB are 960; weights and gradients 128, a state and its output with gradients 128.
import torch
from torch import nn


class Buffer:
    def __init__(self, size):
        self.size = size
        self.entries = []
        self.position = 0

    def push(self, state):
        if len(self.entries) < self.size:
            self.entries.append(None)
        self.entries[self.position] = state
        self.position = (self.position + 1) % self.size


buffer = Buffer(30)
policy = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
for step in range(90):
    buffer.push(torch.randn(2048, 4096, device="cuda"))
    policy(buffer.entries[step * 7 % len(buffer.entries)]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
