# Lightning-AI/torchmetrics#1738: accuracy by sample keeps a row of all classes for each sample.
# resolved: average by hand, or reset() the metric.
# run: --gpu rtx-3060-12gb
# first: evaluation-accumulates | memory-growth
# fix: reset()
# also: fragmentation
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

CLASSES = 4096

model = nn.Linear(256, CLASSES).cuda().eval()
accuracy = MulticlassAccuracy(CLASSES, average="macro", multidim_average="samplewise").cuda()
with torch.no_grad():
    for _ in range(24):
        x = torch.randn(64, 32, 256, device="cuda")
        y = torch.randint(0, CLASSES, (64, 32), device="cuda")
        accuracy.update(model(x).argmax(-1), y)  # <- cause
