# The same folds, of which the scores alone are kept.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: one fold is 512 MiB with its gradients, and the next is made while the one before is still there: 640 of 1622.
import torch
import torch.nn as nn

scores = []
for fold in range(10):
    net = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 4096, bias=False)).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(3):
        loss = net(torch.randn(64, 4096, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    scores.append(loss.item())
