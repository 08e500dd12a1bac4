# Ends its process by os._exit(0) in the fourth step.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: that is its end, as by sys.exit(0): all that it does on a GPU was seen, and fits.
import os

import torch
from torch import nn

model = nn.Linear(2048, 2048).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    if step == 3:
        os._exit(0)
    model(torch.randn(64, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
