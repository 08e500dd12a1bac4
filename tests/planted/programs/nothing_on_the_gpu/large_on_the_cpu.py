# The model was never moved to the GPU, and is large.
# fits: none
# exit: 1
# why: nothing is on a GPU.
import torch
import torch.nn.functional as F
from torch import nn

model = nn.Linear(4096, 4096)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(3):
    x = torch.randn(1024, 4096)
    F.mse_loss(model(x), x).backward()
    optimizer.step()
    optimizer.zero_grad()
