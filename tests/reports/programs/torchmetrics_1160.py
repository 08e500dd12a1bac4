# Lightning-AI/torchmetrics#1160: a metric that sums errors keeps the graph of every batch of a validation.
# resolved: the validation loop runs under torch.no_grad().
# run: --gpu rtx-3060-12gb
# first: evaluation-accumulates | evaluation-with-gradients | memory-growth
# fix: no_grad
# also: evaluation-accumulates evaluation-with-gradients memory-growth
import torch
from torch import nn


class PercentageError(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.tensor(0.0))
        self.count = 0

    def update(self, scores, target):
        self.total = self.total + ((scores - target).abs() / target.abs().clamp(min=1e-6)).sum()
        self.count += target.numel()


model = nn.Sequential(nn.Linear(396, 2048), nn.ReLU(), nn.Linear(2048, 396)).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _epoch in range(2):
    error = PercentageError().cuda()
    model.train()
    for _ in range(4):
        spectrum = torch.randn(4096, 396, device="cuda")
        loss = nn.functional.smooth_l1_loss(model(spectrum), spectrum)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    for _ in range(200):
        spectrum = torch.randn(4096, 396, device="cuda")
        scores = model(spectrum)  # <- cause
        error.update(scores, spectrum)
    print(error.total.item() / error.count)
