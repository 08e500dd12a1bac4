"""A convolutional network with tensors in channels-last order, in bfloat16 autocast, with group normalisation."""

import torch
from recording import record_steps
from torch import nn


def block(inputs, outputs, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(8, outputs), nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, 1, 1), nn.GroupNorm(8, outputs), nn.SiLU(),
    )  # fmt: skip


model = nn.Sequential(block(4, 64), block(64, 128, 2), block(128, 128)).to("cuda", memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters())


def step():
    images = torch.randn(8, 4, 64, 64, device="cuda").to(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(images).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


record_steps("convnet_channels_last", step)
