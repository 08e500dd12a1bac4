# A loop without an end that keeps nothing.
# fits: yes
# exit: 0
# ends: no
# run: --gpu-vram 2
# why: 5 * 64 MiB of 1622, in every step.
import torch
from torch import nn

model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.randn(4096, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
