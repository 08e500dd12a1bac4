# The forward fits, and the backward does not: the error is caught there, by its words, and the batch made smaller.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: 28,672 rows are 448 MiB: batch, hidden and output are 1344 of 1622 with weights, the gradients of the backward
#      are too many; 7168 rows are 112, six times.
import torch
from torch import nn

net = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 4096, bias=False)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
rows, step = 28672, 0
while step < 8:
    x = torch.randn(rows, 4096, device="cuda")
    loss = net(x).sum()
    try:
        loss.backward()
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        rows = rows // 4
        del x, loss
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        continue
    optimizer.step()
    optimizer.zero_grad()
    step += 1
