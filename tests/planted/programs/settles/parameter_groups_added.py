# A layer is added to the model and to the optimizer in each of the first six steps.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: seven layers of 64 MiB with gradients and a momentum each are 1344, and activations of 1 a layer.
import torch
from torch import nn

net = nn.Sequential(nn.Linear(4096, 4096, bias=False)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(30):
    if 1 <= step <= 6:
        net.append(nn.Linear(4096, 4096, bias=False).cuda())
        optimizer.add_param_group({"params": net[-1].parameters()})
    optimizer.zero_grad()
    net(torch.randn(64, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
