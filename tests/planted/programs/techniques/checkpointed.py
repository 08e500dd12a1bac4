# Activation checkpointing: of 24 calls of a block one at a time has its activations.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: inputs of 24 calls of a block, 16 MiB each, are 384; the inside of one and its gradients 4 * 64 + 2 * 16; weights
#      and gradients 64: 736 of 1622. The blocks share their weights.
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(1024, 4096, bias=False)
        self.down = nn.Linear(4096, 1024, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


block = Block().cuda()
optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
for _ in range(6):
    x = torch.randn(4096, 1024, device="cuda")
    for _ in range(24):
        x = checkpoint(block, x, use_reentrant=False)
    x.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
