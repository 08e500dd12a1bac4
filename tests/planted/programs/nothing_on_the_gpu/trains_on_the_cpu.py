# The device is the CPU unless an option says otherwise.
# fits: none
# exit: 1
# why: nothing is on a GPU, so that nothing can be said of one.
import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cpu")
device = parser.parse_args().device
net = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to(device)
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(4):
    net(torch.randn(32, 256, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("done")
