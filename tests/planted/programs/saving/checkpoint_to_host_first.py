# Weights and optimizer go to host memory, and are written from there.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: five layers of 64 MiB with two moments and gradients are 1280; nothing more is made on the GPU.
import torch
from torch import nn


def save(net, optimizer, path):
    weights = {name: value.cpu() for name, value in net.state_dict().items()}
    torch.save({"net": weights, "optimizer": optimizer.state_dict()}, path)


net = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(5)]).cuda()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-4, foreach=False)
for epoch in range(3):
    for _ in range(2):
        net(torch.randn(64, 4096, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    save(net, optimizer, f"epoch{epoch}.pt")
