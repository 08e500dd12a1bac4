# The best model is a deep copy, made after the training: model, gradients and copy do not fit.
# fits: no
# exit: 3
# step: 5
# run: --gpu-vram 2
# why: nine layers of 64 MiB are 576, their gradients 576 (zero_grad runs before the backward), which deepcopy copies
#      too: 1152, and of 1622 are left 470 for a copy of 576, after the fifth step.
import copy

import torch
from torch import nn

net = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(9)]).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(5):
    optimizer.zero_grad()
    net(torch.randn(64, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
best = copy.deepcopy(net)
torch.save(best.state_dict(), "best.pt")
