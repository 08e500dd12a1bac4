# 64 KiB a step for 2,500 steps: it grows all the time, and ends long before the GPU is full.
# fits: yes
# exit: 0
# grows: 0.0625
# run: --gpu-vram 2
# why: 2,500 of 64 KiB are 156 MiB, and beside them are weights 1, gradients 1 and a batch.
import torch
from torch import nn

model = nn.Linear(512, 512, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for _ in range(2500):
    y = model(torch.randn(32, 512, device="cuda"))
    y.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(y.detach())  # <- culprit
