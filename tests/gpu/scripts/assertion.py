"""Looks up a row that an embedding does not have, in its third step: a device-side assertion."""

import torch

model = torch.nn.Embedding(10, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for number in range(4):
    rows = torch.tensor([1, 2, 12 if number == 2 else 3], device="cuda")
    model(rows).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
