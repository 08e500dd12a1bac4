"""Evaluation beside training, in each of the ways to have no gradients, with and without autocast."""

import torch
from torch import nn

model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(512, 10),
).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)


@torch.no_grad()
def decorated():
    model.eval()
    total = torch.zeros((), device="cuda")
    for _ in range(2):
        total += nn.functional.cross_entropy(
            model(torch.randn(64, 3, 32, 32, device="cuda")), torch.zeros(64, dtype=torch.long, device="cuda")
        )
    model.train()
    return total.item()


def inferred():
    model.eval()
    hits = 0
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
        for _ in range(2):
            hits += (model(torch.randn(64, 3, 32, 32).cuda()).argmax(1) == 0).sum().item()
    model.train()
    return hits


def disabled():
    torch.set_grad_enabled(False)
    found = [model(torch.randn(64, 3, 32, 32).cuda()).cpu() for _ in range(2)]
    torch.set_grad_enabled(True)
    return torch.cat(found).shape


for _ in range(2):
    for _ in range(2):
        loss = nn.functional.cross_entropy(model(torch.randn(64, 3, 32, 32).cuda()), torch.randint(0, 10, (64,)).cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(decorated(), inferred(), disabled())
