# The last batch of an epoch has another width.
# fits: none
# exit: 1
# run: --gpu-vram 2
# why: it raises in its fifth step.
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(1024, 1024)

    def forward(self, x):
        return self.inner(x)  # <- culprit


net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for width in (1024, 1024, 1024, 1024, 1000, 1024):
    net(torch.randn(32, width, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
