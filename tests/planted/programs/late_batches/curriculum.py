# The image grows after ten steps, as a curriculum has it.
# fits: no
# exit: 3
# step: 11
# run: --gpu-vram 2
# why: 16 images of 512 by 512 in 64 channels are 1 GiB, twice: the convolution's result and relu's.
import torch
import torch.nn.functional as F
from torch import nn


def side_of(step):
    return 64 if step < 10 else 512


net = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 3, 3, padding=1)).cuda()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
for step in range(20):
    images = torch.randn(16, 3, side_of(step), side_of(step), device="cuda")
    loss = F.l1_loss(net(images), images)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
