# Batches have 512 rows, and the seventh has 16,384.
# fits: no
# exit: 3
# step: 7
# run: --gpu-vram 2
# why: 16,384 rows of 4096 are 256 MiB; batch, two hidden layers of 4 times that width would be 2 GiB: more than 1622.
import torch
from torch import nn

net = nn.Sequential(nn.Linear(4096, 16384, bias=False), nn.ReLU(), nn.Linear(16384, 8, bias=False)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
rows = [512] * 6 + [16384] + [512] * 20
for number in rows:
    x = torch.randn(number, 4096, device="cuda")
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
