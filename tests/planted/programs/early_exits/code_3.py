# Leaves with 3, which is memprof's for "does not fit": it becomes 1.
# fits: yes
# exit: 1
# run: --gpu-vram 2
# why: what was seen of it fits; the exit code is its own, and 3 would be taken for a verdict.
import torch
from torch import nn

model = nn.Linear(2048, 2048).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    model(torch.randn(64, 2048, device="cuda")).sum().backward()
    if step == 3:
        raise SystemExit(3)
    optimizer.step()
    optimizer.zero_grad()
