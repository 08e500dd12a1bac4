# A quarter of a megabyte a step in a loop without an end: it runs out after more steps than a run makes.
# fits: no
# exit: 3
# step: 6280
# grows: 0.25
# ends: no
# run: --gpu-vram 2
# why: 1622 MiB less weights and gradients 32, a batch and what is made of it 5 / 4, and workspaces 17 leave 1572, which
#      is 6287 of 1/4 (seen in step 6274).
import torch
from torch import nn

model = nn.Linear(2048, 2048, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
corrections = []
while True:
    y = model(torch.randn(32, 2048, device="cuda"))
    y.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    corrections.append(y.detach())  # <- culprit
