# Mixed precision by autocast.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: weights 256 MiB, their half copies 128, gradients 256; 8192 rows of 4096 are 64 in half precision: batch, four
#      results and two gradients 448; together 1088 of 1622.
import torch
from torch import nn

layers = [module for _ in range(4) for module in (nn.Linear(4096, 4096, bias=False), nn.ReLU(inplace=True))]
net = nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(6):
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = net(x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
