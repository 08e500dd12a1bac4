# Tensors of a subclass are kept in a list.
# fits: no
# exit: 3
# step: 20
# grows: 64
# run: --gpu-vram 2
# why: as containers/list_of_outputs: 64 MiB a step, of 1221.
import torch
from torch import nn


class Tagged(torch.Tensor):
    pass


model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for _ in range(50):
    y = model(torch.randn(4096, 4096, device="cuda").as_subclass(Tagged))
    y.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(y.detach())  # <- culprit
