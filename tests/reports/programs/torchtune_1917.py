# meta-pytorch/torchtune#1917: losses of all micro-batches are summed, and backward is called once, at the end.
# resolved: backward for each micro-batch, and gradients scaled before the optimizer's step.
# run: --gpu rtx-3060-12gb
# first: memory-growth | does-not-fit | idle-memory
# fix: backward
import torch
from torch import nn
from torch.nn import functional as F

ACCUMULATE = 16


class Mlp(nn.Module):
    def __init__(self, width=2048):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


model = Mlp().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    total, tokens = 0.0, 0
    for _ in range(ACCUMULATE):
        x = torch.randn(4096, 2048, device="cuda")
        total = total + model(x).square().sum()  # <- cause
        tokens += len(x)
    (total / tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
