# Models of all folds stay in a list, with their optimizers.
# fits: no
# exit: 3
# step: 10
# run: --gpu-vram 2
# why: a fold is weights of 128 MiB and two moments of 128: 384. Three folds are 1152, and the third had 128 of
#      gradients and 128 of temporaries beside them. Of 1622, 470 are left for the fourth, which needs 512, in its
#      first step, the tenth.
import torch
import torch.nn as nn

folds = []
for fold in range(10):
    net = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 4096, bias=False)).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    for _ in range(3):
        net(torch.randn(64, 4096, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    folds.append((net, optimizer))  # <- culprit
