# One layer more is trained every second step, from the last to the first; after twelve steps all are.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: six layers of 64 MiB, in the end with gradients and a momentum of 64 each: 1152, and activations of 1 a layer.
import torch
from torch import nn

net = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(6)]).cuda()
net.requires_grad_(False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(40):
    if step % 2 == 0 and step < 12:
        net[5 - step // 2].requires_grad_(True)
    optimizer.zero_grad()
    net(torch.randn(64, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
