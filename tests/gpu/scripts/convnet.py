"""A convolutional network in float32, with batch normalisation and SGD with momentum."""

import torch
from recording import record_steps
from torch import nn


def block(inputs, outputs, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
    )  # fmt: skip


model = nn.Sequential(
    block(3, 64, 2), block(64, 128, 2), block(128, 256, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000)
).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def step():
    images = torch.randn(32, 3, 224, 224, device="cuda")
    labels = torch.randint(0, 1000, (32,), device="cuda")
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


record_steps("convnet", step)
