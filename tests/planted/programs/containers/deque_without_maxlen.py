# A deque that was meant to be a window has no maxlen.
# fits: no
# exit: 3
# step: 21
# grows: 64
# run: --gpu-vram 2
# why: 1622 MiB less weights, momentum, batch, gradients of output and weights, 5 * 64, and workspaces 17 leave 1285:
#      20 of 64.
from collections import deque

import torch
from torch import nn

window = deque()
model = nn.Linear(4096, 4096, bias=False, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
step = 0
while step < 50:
    x = torch.randn(4096, 4096, device="cuda")
    y = model(x)
    window.append(y.detach())  # <- culprit
    y.sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    step += 1
