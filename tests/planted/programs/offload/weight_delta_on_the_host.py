# A change of the weights is multiplied out in host memory for each position, and brought to the GPU to be used.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: weights 16 MiB and a delta of 16 for each of 16 positions, which the graph keeps: 256, and their gradients one
#      at a time.
import torch
from torch import nn


class Delta(nn.Module):
    def __init__(self, width, rank):
        super().__init__()
        self.base = nn.Linear(width, width, bias=False)
        self.left = nn.Parameter(torch.randn(width, rank))
        self.right = nn.Parameter(torch.randn(rank, width))

    def forward(self, x):
        out = []
        for t in range(x.shape[1]):
            gate = x[:, t].mean().cpu()
            delta = (self.left.cpu() @ self.right.cpu()) * gate
            out.append(x[:, t] @ delta.to(x.device))
        return self.base(x) + torch.stack(out, 1)


net = Delta(2048, 8).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(3):
    net(torch.randn(2, 16, 2048, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
