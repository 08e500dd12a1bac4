# An evaluation calls torch.no_grad() without `with`, which does nothing.
# fits: yes
# exit: 0
# run: --gpu-vram 6
# why: eight layers keep 32,768 x 2,048 numbers each, 256 MiB, for a backward that never comes.
import torch
from torch import nn

net = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(2048, 2048), nn.Sigmoid()))).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    net.train()
    for _ in range(3):
        loss = net(torch.randn(1024, 2048, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    torch.no_grad()  # <- culprit
    total = 0.0
    for _ in range(3):
        total += net(torch.randn(32768, 2048, device="cuda")).mean().item()
    print(epoch, total)
