# Weights of every step are copied for an average of checkpoints, on the GPU.
# fits: no
# exit: 3
# step: 24
# grows: 64
# run: --gpu-vram 2
# why: 1622 MiB less weights 64 and gradients 64, batch and output 8, are 23 copies of 64; the 24th is not made.
import torch
from torch import nn


def train(model, batches, optimizer):
    snapshots = []
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        snapshots.append({name: value.clone() for name, value in model.state_dict().items()})  # <- culprit
    return snapshots


model = nn.Linear(4096, 4096, bias=False).to("cuda:0")
train(
    model,
    (torch.randn(256, 4096, device="cuda:0") for _ in range(40)),
    torch.optim.SGD(model.parameters(), lr=0.1),
)
