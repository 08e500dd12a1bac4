# What the backward needs is kept in host memory by torch's own context.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: 8192 rows of 4096 are 128 MiB, of which 24 blocks save one each: 3 GiB, which are in host memory; a few at a time
#      are on the GPU, and weights of 24 narrow pairs, 2 MiB each, with their gradients.
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.down = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return torch.tanh(self.up(self.down(x)))


net = nn.Sequential(*[Block(4096, 64) for _ in range(24)]).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    with torch.autograd.graph.save_on_cpu():
        loss = net(torch.randn(8192, 4096, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
