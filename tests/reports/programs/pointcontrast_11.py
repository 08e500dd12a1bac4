# facebookresearch/PointContrast#11: all distances of two clouds of points, with a difference for each coordinate.
# resolved: another loss, over fewer pairs; torch.cdist makes the distances without the differences.
# run: --gpu v100-32gb
# first: does-not-fit
# fix: cdist | in parts | in chunks
# not: chunked-loss vocabulary-cap amp-bfloat16
import torch
from torch import nn


def distances(a, b):
    return torch.sum((a.unsqueeze(1) - b.unsqueeze(0)).pow(2), 2).add(1e-7).sqrt()  # <- cause


net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 32)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    first = net(torch.randn(32768, 6, device="cuda"))
    second = net(torch.randn(8192, 6, device="cuda"))
    loss = distances(first, second).min(1).values.mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
