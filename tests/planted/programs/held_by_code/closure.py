# Functions that are to plot something later close over the activations of their step.
# fits: no
# exit: 3
# step: 20
# grows: 64
# run: --gpu-vram 2
# why: as containers/list_of_outputs: 64 MiB a step, of 1221.
import torch
from torch import nn

later = []


def remember(values, name):
    def plot():
        return name, values.mean().item()

    later.append(plot)  # <- culprit


model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(64):
    x = torch.randn(4096, 4096, device="cuda")
    y = model(x)
    remember(y.detach(), f"step {step}")
    y.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
