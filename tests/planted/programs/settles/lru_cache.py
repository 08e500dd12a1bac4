# functools.lru_cache keeps the last eight of twenty kernels.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: eight of 64 MiB and a ninth while it is made are 576; weights, gradients, batch and what is made of it 6 * 64.
import functools

import torch
from torch import nn


@functools.lru_cache(maxsize=8)
def kernel(shift):
    return torch.full((4096, 4096), float(shift), device="cuda")


model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    (model(torch.randn(4096, 4096, device="cuda")) * kernel(step % 20)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
