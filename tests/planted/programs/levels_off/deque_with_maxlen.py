# A window over the last twelve outputs.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: twelve outputs of 64 MiB are 768; weights, batch and two gradients 4 * 64 more: 1024 of 1622.
from collections import deque

import torch
from torch import nn

window = deque(maxlen=12)
model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(50):
    y = model(torch.randn(4096, 4096, device="cuda"))
    window.append(y.detach())
    y.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
