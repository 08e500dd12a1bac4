# Halves its batch down to one and gives up: the weights alone are too many.
# fits: no
# exit: 3
# step: 1
# run: --gpu-vram 2
# why: 24 layers of 64 MiB are 1536 of 1622, and the second gradient does not fit, however small the batch.
import torch
from torch import nn

net = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(24)]).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
rows = 8
while True:
    try:
        for _ in range(5):
            net(torch.randn(rows, 4096, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        break
    except torch.cuda.OutOfMemoryError:
        optimizer.zero_grad()
        if rows == 1:
            raise
        rows //= 2
