# After training, the low-rank update of each layer is multiplied out and kept beside the weights.
# fits: no
# exit: 3
# step: 8
# run: --gpu-vram 2
# why: fourteen frozen layers of 64 MiB are 896; fourteen products of 64 more are 1792 of 1622, after the eighth step.
import torch
from torch import nn


class Adapted(nn.Module):
    def __init__(self, width, rank):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width), requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, width))
        self.up = nn.Parameter(torch.zeros(width, rank))

    def forward(self, x):
        return x @ self.weight.T + x @ self.down.T @ self.up.T


net = nn.Sequential(*[Adapted(4096, 8) for _ in range(14)]).cuda()
optimizer = torch.optim.AdamW([value for value in net.parameters() if value.requires_grad])
for _ in range(8):
    net(torch.randn(64, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    merged = {index: layer.weight + layer.up @ layer.down for index, layer in enumerate(net)}
torch.save(merged, "merged.pt")
