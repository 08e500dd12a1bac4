# LBFGS keeps a hundred pairs of vectors, each as large as all parameters.
# fits: yes
# exit: 0
# run: --gpu-vram 8
# why: parameters are 16 MiB, and 79 iterations keep two vectors as large: 2,528 MiB; ten of them would be 320.
import torch
from torch import nn

net = nn.Sequential(nn.Linear(2048, 1024), nn.Tanh(), nn.Linear(1024, 2048)).cuda()
optimizer = torch.optim.LBFGS(net.parameters(), max_iter=20)
data = torch.randn(64, 2048, device="cuda")


def closure():
    optimizer.zero_grad()
    loss = (net(data) - data).square().mean()
    loss.backward()
    return loss


for step in range(4):
    print(step, optimizer.step(closure).item())
