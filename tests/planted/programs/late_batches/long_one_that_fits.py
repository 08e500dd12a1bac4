# Batches have 512 rows, and the seventh has 4096: more than the others, and it fits.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: weights and gradients of 128 each; 4096 rows of 4096 are 64 MiB, five times: 576 of 1622.
import torch
from torch import nn

net = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.ReLU(), nn.Linear(4096, 4096, bias=False)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(12):
    x = torch.randn(4096 if step == 6 else 512, 4096, device="cuda")
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
