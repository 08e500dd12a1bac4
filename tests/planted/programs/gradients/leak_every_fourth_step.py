# Every fourth step the output is kept for a picture.
# fits: no
# exit: 3
# step: 77
# run: --gpu-vram 2
# why: 1622 MiB less weights, batch, output and the square's backward 7 * 64, and workspaces 17 leave 1157: 18 of 64.
#      The nineteenth is kept at the end of step 76.
import torch
from torch import nn

pictures = []
model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 201):
    y = model(torch.randn(4096, 4096, device="cuda"))
    y.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 4 == 0:
        pictures.append(y.detach())  # <- culprit
