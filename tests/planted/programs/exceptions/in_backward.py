# A loss of the step before is used again, whose graph is no longer there.
# fits: none
# exit: 1
# run: --gpu-vram 2
# why: it raises in its fourth step.
import torch
from torch import nn

net = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
before = None
for step in range(8):
    loss = net(torch.randn(32, 1024, device="cuda")).square().mean()
    if step == 3:
        loss = loss + before
    loss.backward()  # <- culprit
    optimizer.step()
    optimizer.zero_grad()
    before = loss
