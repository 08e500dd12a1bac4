# An endless loader that is left after a number of steps.
# fits: yes
# exit: 0
# grows: 64
# run: --gpu-vram 2
# why: fourteen outputs of 64 MiB, of about 20 that there is room for.
import argparse
import itertools

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--max-steps", type=int, default=14)
args = parser.parse_args()

model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
outputs = {}
for step in itertools.count(1):
    y = model(torch.randn(4096, 4096, device="cuda"))
    y.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    outputs[step] = y.detach()  # <- culprit
    if step == args.max_steps:
        break
