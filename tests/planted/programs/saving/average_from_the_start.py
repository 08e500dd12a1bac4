# A moving average of the weights, made before the first step and updated in place, is there from the first step on.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: seven layers of 64 MiB, their average and their gradients are 1344 of 1622; batch and activations of 64 rows are
#      1 a layer.
import copy

import torch
from torch import nn


class Average:
    def __init__(self, model, decay=0.999):
        self.copy = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for mine, theirs in zip(self.copy.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 1 - self.decay)


net = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(7)]).cuda()
average = Average(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
for _ in range(20):
    net(torch.randn(64, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update(net)
torch.save(average.copy.state_dict(), "average.pt")
