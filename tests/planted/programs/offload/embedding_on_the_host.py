# A large table stays in host memory, and its rows go to the GPU.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: a table of 500,000 by 1024 would be 1953 MiB; on the GPU are rows of 4 MiB, weights and gradients of 4.
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(500_000, 1024)
        self.body = nn.Linear(1024, 1024).cuda()

    def forward(self, ids):
        return self.body(self.table(ids).cuda())


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(6):
    ids = torch.randint(0, 500_000, (1024,))
    net(ids).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
