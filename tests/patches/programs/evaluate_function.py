# A function that evaluates keeps the graphs of its calls in a list of their losses.
# run: --gpu-vram 2
import torch
from torch import nn


def evaluate(model, batches):
    model.eval()
    losses = []
    for _ in range(batches):
        x = torch.randn(2048, 4096, device="cuda")
        losses.append(model(x).square().mean())
    return torch.stack(losses).mean().item()


model = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Tanh(), nn.Linear(4096, 4096, bias=False)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model.train()
    model(torch.randn(1024, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(evaluate(model, 8))
