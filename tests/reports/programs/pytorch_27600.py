# pytorch/pytorch#27600: what ran out of memory is still there when it is tried again in the except block.
# resolved: the exception keeps the frames of its traceback; leave the except block (and the variables) first.
# run: --gpu rtx-3070
# first: does-not-fit | out-of-memory-caught | idle-memory
# fix: except
# also: out-of-memory-caught
import torch
from torch import nn


def stack(width, count):
    x = torch.randn(100, width, device="cuda")
    layers = []
    for _ in range(count):
        layer = nn.Linear(width, width).cuda()
        layers.append(layer)
        x = layer(x)
    return x, layers


try:
    stack(10000, 100)
except RuntimeError as error:
    print(error)
    x, layers = stack(5000, 60)  # <- cause
    print(x.mean().item())
