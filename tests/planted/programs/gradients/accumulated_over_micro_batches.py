# Four micro-batches a step, whose gradients are added up.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: weights 128, gradients 128, one more 64, moments 256, five activations of 64: 896 of 1622.
import torch
from torch import nn

net = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 4096, bias=False)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
for micro in range(80):
    loss = net(torch.randn(4096, 4096, device="cuda")).square().mean() / 4
    loss.backward()
    if micro % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
