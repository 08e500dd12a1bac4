"""A small model learns from the logits of a large one that is frozen."""

import torch
from torch import nn

teacher = (
    nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)).cuda().eval()
)
student = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()
for parameter in teacher.parameters():
    parameter.requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters())
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
for _ in range(3):
    rows, labels = torch.randn(256, 784).cuda(), torch.randint(0, 10, (256,)).cuda()
    with torch.no_grad():
        soft = (teacher(rows) / 4).softmax(-1)
    logits = student(rows)
    distance = nn.functional.kl_div((logits / 4).log_softmax(-1), soft, reduction="batchmean") * 16
    (0.7 * distance + 0.3 * nn.functional.cross_entropy(logits, labels)).backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
