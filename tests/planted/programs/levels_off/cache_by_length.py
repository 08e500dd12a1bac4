# A cache of masks by length fills up: there are twelve lengths.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: masks of 1024 to 2048, 4 to 16 MiB, 122 of them together, and beside them weights 16, gradients 16 and scores of
#      16 at most.
import torch
from torch import nn

LENGTHS = [1024, 1120, 1216, 1312, 1408, 1504, 1600, 1696, 1792, 1888, 1984, 2048]
masks = {}


def mask_of(length):
    if length not in masks:
        masks[length] = torch.ones(length, length, device="cuda").tril()
    return masks[length]


model = nn.Linear(2048, 2048, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    length = LENGTHS[step % 12]
    hidden = model(torch.randn(length, 2048, device="cuda"))
    scores = (hidden @ hidden.T) * mask_of(length)
    scores.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
