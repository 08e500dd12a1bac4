# A gradient hook checks what it is given, and raises.
# fits: none
# exit: 1
# run: --gpu-vram 2
# why: it raises when it is called for the fourth time.
import torch
from torch import nn

calls = 0


def check(gradient):
    global calls
    calls += 1
    if calls > 3:
        raise RuntimeError("a gradient too many")  # <- culprit
    return gradient


net = nn.Linear(1024, 1024).cuda()
net.weight.register_hook(check)
optimizer = torch.optim.Adam(net.parameters())
for _ in range(8):
    net(torch.randn(32, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
