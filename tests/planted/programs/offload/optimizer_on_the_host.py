# Master weights and Adam's state are in host memory; gradients go there, weights come back.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: ten layers of 64 MiB with gradients are 1280; with two moments on the GPU they would be 2560.
import torch
from torch import nn

net = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(10)]).cuda()
masters = [p.detach().cpu().clone().requires_grad_() for p in net.parameters()]
optimizer = torch.optim.AdamW(masters, lr=1e-4)
for _ in range(4):
    net(torch.randn(64, 4096, device="cuda")).square().mean().backward()
    for master, p in zip(masters, net.parameters(), strict=True):
        master.grad = p.grad.cpu()
        p.grad = None
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, net.parameters(), strict=True):
            p.copy_(master)
