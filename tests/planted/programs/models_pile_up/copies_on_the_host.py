# A copy of the weights is kept after each step in host memory, where there is room.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: on the GPU are weights 64, gradients 64, batch, output and their like 16.
import torch
from torch import nn

model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
snapshots = []
for _ in range(40):
    model(torch.randn(256, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    snapshots.append({name: value.cpu() for name, value in model.state_dict().items()})
