# The last layer is in host memory, and its gradient comes back.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: on the GPU are weights of 64 MiB, gradients of 64 and activations of 16.
import torch
import torch.nn.functional as F
from torch import nn

body = nn.Linear(4096, 4096, bias=False).cuda()
head = nn.Linear(4096, 10)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
for _ in range(6):
    features = body(torch.randn(1024, 4096, device="cuda"))
    loss = F.cross_entropy(head(features.cpu()), torch.zeros(1024, dtype=torch.long))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
