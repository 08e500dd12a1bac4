# A thread ends the process by os._exit(0), as watchdogs do.
# fits: none
# exit: 1
# run: --gpu-vram 2
# why: the thread ends the process under the hands of the run: nothing is left that could say what was seen.
import os
import threading

import torch
from torch import nn

model = nn.Linear(2048, 2048).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    model(torch.randn(64, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 3:
        watchdog = threading.Thread(target=os._exit, args=(0,))
        watchdog.start()
        watchdog.join()
