# Leaves with a code of its own in its fourth step.
# fits: yes
# exit: 7
# run: --gpu-vram 2
# why: what was seen of it fits, four steps of 48 MiB; the exit code is its own.
import sys

import torch
from torch import nn

model = nn.Linear(2048, 2048).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    if step == 3:
        print("data is damaged", file=sys.stderr)
        sys.exit(7)
    model(torch.randn(64, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
