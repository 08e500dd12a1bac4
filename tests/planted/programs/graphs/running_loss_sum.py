# The losses of all steps so far are summed with their graphs, and the sum is what runs backward.
# fits: no
# exit: 3
# step: 10
# grows: 128
# run: --gpu-vram 2
# why: the graph of a step holds the batch and the output, 128 MiB. 1622 less weights 64, the square's backward 4 * 64,
#      two gradients of the weights that are being added 128, and workspaces 17 leave 1157: 9 of 128.
import torch
from torch import nn

model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
total = torch.zeros((), device="cuda")
for step in range(40):
    batch = torch.randn(4096, 4096, device="cuda")
    total = total + model(batch).square().mean()  # <- culprit
    optimizer.zero_grad()
    total.backward(retain_graph=True)
    optimizer.step()
