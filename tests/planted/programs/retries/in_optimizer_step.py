# The state of Adam does not fit: a smaller model is tried, and does.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: ten layers of 64 MiB with gradients and moments are 2560; five are 1280, and temporaries of one layer 2 * 64.
import torch
from torch import nn


def attempt(layers):
    net = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(layers)]).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    for _ in range(5):
        net(torch.randn(16, 4096, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return layers


found = None
for layers in (10, 5):
    try:
        found = attempt(layers)
        break
    except torch.OutOfMemoryError:
        print("not", layers)
print(found)
