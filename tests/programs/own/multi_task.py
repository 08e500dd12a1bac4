"""One trunk with several heads, weighted by what is learnt of their uncertainty."""

import torch
from torch import nn

trunk = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Dropout(0.1)).cuda()
heads = nn.ModuleDict({"sort": nn.Linear(512, 10), "size": nn.Linear(512, 1), "tags": nn.Linear(512, 50)}).cuda()
doubt = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in heads}).cuda()
optimizer = torch.optim.AdamW(
    [{"params": trunk.parameters(), "lr": 1e-4}, {"params": [*heads.parameters(), *doubt.parameters()], "lr": 1e-3}]
)
for _ in range(3):
    shared = trunk(torch.randn(128, 256).cuda())
    losses = {
        "sort": nn.functional.cross_entropy(heads["sort"](shared), torch.randint(0, 10, (128,)).cuda()),
        "size": nn.functional.l1_loss(heads["size"](shared)[:, 0], torch.randn(128).cuda()),
        "tags": nn.functional.binary_cross_entropy_with_logits(
            heads["tags"](shared), torch.rand(128, 50).cuda().round()
        ),
    }
    total = sum((-doubt[name]).exp() * loss + doubt[name] for name, loss in losses.items())
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
    print({name: loss.item() for name, loss in losses.items()})
