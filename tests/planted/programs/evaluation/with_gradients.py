# Evaluation forgets no_grad, and has larger batches than training: their graphs do not fit.
# fits: no
# exit: 3
# run: --gpu-vram 2
# why: 16,384 rows of 4096 are 256 MiB; the batch and the results of six layers and six tanh (a graph keeps six) are 7
#      * 256. The forward has gradients, and is an evaluation's: of no step.
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
score = net(torch.randn(16384, 4096, device="cuda")).mean()
print(score.item())
