# Lightning-AI/torchmetrics#3294: a metric with a list as its state, called in every training step, grows.
# resolved: reset() it each epoch, or take binned thresholds, of which the state is small.
# run: --gpu rtx-3060-12gb
# first: memory-growth
# fix: reset()
import torch
from torch import nn
from torchmetrics.classification import BinaryAUROC

model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1)).cuda()
optimizer = torch.optim.Adam(model.parameters())
auroc = BinaryAUROC().cuda()

for _epoch in range(3):
    for _ in range(20):
        x = torch.randn(65536, 64, device="cuda")
        y = (torch.rand(65536, device="cuda") > 0.5).long()
        scores = model(x).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, y.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(auroc(scores.detach().sigmoid(), y))  # <- cause
