# Nobody zeroes the gradients, which is wrong in another way: they are added to where they are, and nothing grows.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: weights 64, gradients 64, another gradient before it is added 64, batch and output with its gradient 3 * 64.
import torch
from torch import nn

model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(40):
    model(torch.randn(4096, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
