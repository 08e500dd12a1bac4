# meta-pytorch/captum#538: integrated gradients with 200 steps put all 200 inputs into one batch.
# resolved: internal_batch_size, which evaluates them in parts.
# run: --gpu t4
# first: does-not-fit
# fix: in parts | in chunks | micro-batch | batches of
import itertools

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [3, 64, 64, 128, 256]
        self.body = nn.Sequential(
            *[
                part
                for before, after in itertools.pairwise(widths)
                for part in (nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2))
            ]
        )
        self.head = nn.Linear(256, 14)

    def forward(self, image):
        return self.head(self.body(image).mean((2, 3)))


def integrate(model, image, baseline, target, steps):
    alphas = torch.linspace(0, 1, steps, device="cuda").view(-1, 1, 1, 1)
    path = (baseline + alphas * (image - baseline)).requires_grad_()
    scores = model(path)[:, target]  # <- cause
    gradients = torch.autograd.grad(scores.sum(), path)[0]
    return (image - baseline) * gradients.mean(0)


model = Net().eval().cuda()
image = torch.rand(1, 3, 512, 512, device="cuda")
print(integrate(model, image, torch.zeros_like(image), 3, 200).shape)
