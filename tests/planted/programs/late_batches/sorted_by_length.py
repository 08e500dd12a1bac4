# Batches come sorted, the shortest first, each 256 rows longer: no step keeps anything, and the last ones do not fit.
# fits: no
# exit: 3
# step: 88
# run: --gpu-vram 2 --alloc-conf expandable_segments:True
# why: step n has 256 n rows, 4 n MiB. Its backward has the batch, the hidden layer, the output's gradient and the
#      hidden layer's, 16 n. 1622 less weights 128, one gradient of them 64 and workspaces 17 leave 1413: 88 of 16.
#      With segments that expand next to nothing is lost between batches of different lengths.
import torch
from torch import nn

net = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 4096, bias=False)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for rows in range(256, 256 * 101, 256):
    x = torch.randn(rows, 4096, device="cuda")
    net(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
