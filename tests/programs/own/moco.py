"""Contrast with a queue: a key encoder follows by momentum, the keys of past batches are the negatives."""

import copy

import torch
from torch import nn

query = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
query = nn.Sequential(query, nn.Linear(64, 128)).cuda()
key = copy.deepcopy(query)
for parameter in key.parameters():
    parameter.requires_grad = False
queue = nn.functional.normalize(torch.randn(128, 4096, device="cuda"), dim=0)
pointer = 0
optimizer = torch.optim.SGD(query.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
for _ in range(3):
    one, other = torch.randn(32, 3, 96, 96).cuda(non_blocking=True), torch.randn(32, 3, 96, 96).cuda(non_blocking=True)
    found = nn.functional.normalize(query(one), dim=1)
    with torch.no_grad():
        for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
            slow.data = slow.data * 0.999 + fast.data * 0.001
        shuffled = torch.randperm(32, device="cuda")
        keys = nn.functional.normalize(key(other[shuffled]), dim=1)[torch.argsort(shuffled)]
    positive = torch.einsum("nc,nc->n", found, keys)[:, None]
    negative = torch.einsum("nc,ck->nk", found, queue.clone().detach())
    logits = torch.cat([positive, negative], 1) / 0.07
    loss = nn.functional.cross_entropy(logits, torch.zeros(32, dtype=torch.long).cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    queue[:, pointer : pointer + 32] = keys.T
    pointer = (pointer + 32) % 4096
