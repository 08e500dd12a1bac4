# The same evaluation under no_grad fits.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: weights 384 and, if not let go of, gradients 384; without a graph a result is there with the one before: 3 *
#      256.
import torch
from torch import nn

layers = [module for _ in range(6) for module in (nn.Linear(4096, 4096, bias=False), nn.Tanh())]
net = nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(6):
    net(torch.randn(1024, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
net.eval()
with torch.no_grad():
    score = net(torch.randn(16384, 4096, device="cuda")).mean()
print(score.item())
