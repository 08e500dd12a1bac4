# A layer appends its attention map to a list of its own, to be looked at, and nobody looks.
# fits: no
# exit: 3
# step: 22
# grows: 64
# run: --gpu-vram 2
# why: 64 MiB a step, 4096 by 4096. 1622 less weights and gradients 16, batch, queries and keys 48, output and its
#      gradient 32, and in the backward the gradients of the map and of the scores, 128, leave 1398: 21 of 64.
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.maps = []

    def forward(self, x):
        scores = self.query(x) @ self.key(x).T
        weights = scores.softmax(-1)
        self.maps.append(weights.detach())  # <- culprit
        return weights @ x


model = Attention(1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(48):
    x = torch.randn(4096, 1024, device="cuda")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
