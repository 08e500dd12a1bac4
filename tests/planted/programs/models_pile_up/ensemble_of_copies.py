# A copy of the model is kept after each epoch of ten steps, each of six micro-batches.
# fits: no
# exit: 3
# step: 101
# run: --gpu-vram 2
# why: 1622 MiB less weights 128, gradients 128, another gradient before it is added 64, batch and outputs 4 * 4 and
#      workspaces leave less than 1280: with the tenth copy of 128, made after step 100, the next backward has no room.
import copy

import torch
from torch import nn


class Ensemble:
    def __init__(self):
        self.members = []

    def add(self, model):
        self.members.append(copy.deepcopy(model).eval())  # <- culprit


model = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.ReLU(), nn.Linear(4096, 4096, bias=False)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ensemble = Ensemble()
for epoch in range(20):
    for _ in range(10):
        optimizer.zero_grad(set_to_none=False)
        for _ in range(6):
            (model(torch.randn(256, 4096, device="cuda")).square().mean() / 6).backward()
        optimizer.step()
    ensemble.add(model)
