# A metric hands out a copy of its list, clones of the tensors included, and keeps all copies.
# fits: no
# exit: 3
# step: 13
# run: --gpu-vram 2
# why: after n steps there are n tensors of 16 MiB and 1 + 2 + ... + n clones: 16 (n + n (n + 1) / 2). 1622 less
#      weights and gradients 32, batch 16 and output with gradient 32 leave 1542: 96 tensors, which n = 12 (90) has and
#      n = 13 (104) not.
import torch
from torch import nn


class Metric:
    def __init__(self):
        self.values = []
        self.snapshots = []

    def update(self, value):
        self.values.append(value)

    def compute(self):
        self.snapshots.append([value.clone() for value in self.values])  # <- culprit
        return len(self.snapshots[-1])


metric = Metric()
model = nn.Linear(2048, 2048, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(40):
    x = torch.randn(2048, 2048, device="cuda")
    y = model(x)
    y.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    metric.update(y.detach())
    metric.compute()
