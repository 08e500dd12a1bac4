# A window over the last 300 outputs, of steps with sixty micro-batches: it is long before it is full.
# fits: yes
# exit: 0
# grows: 4
# ends: no
# run: --gpu-vram 2
# why: it grows until it is full: 300 outputs of 4 MiB are 1200; weights and gradients 2 * 16, another gradient 16, and
#      batch, output and what its square needs 8 * 4 more: 1280 of 1622.
from collections import deque

import torch
from torch import nn

window = deque(maxlen=300)
model = nn.Linear(2048, 2048, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2000):
    for _ in range(60):
        y = model(torch.randn(512, 2048, device="cuda"))
        y.square().mean().backward()
    window.append(y.detach())
    optimizer.step()
    optimizer.zero_grad()
