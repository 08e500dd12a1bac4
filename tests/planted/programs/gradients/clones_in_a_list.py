# The gradients of each step are cloned, to plot their norms at the end.
# fits: no
# exit: 3
# step: 24
# grows: 64
# run: --gpu-vram 2
# why: 1622 MiB less weights 64, gradients 64 and workspaces 17 leave 1477: 23 of 64, batch and output of 16 rows
#      beside them.
import torch
from torch import nn

history = []


def keep_gradients(model):
    for parameter in model.parameters():
        history.append(parameter.grad.clone())  # <- culprit


model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(60):
    optimizer.zero_grad()
    model(torch.randn(16, 4096, device="cuda")).square().mean().backward()
    keep_gradients(model)
    optimizer.step()
