"""Diffusion: noise of a random time is predicted, and an average of the weights samples."""

import torch
from torch import nn


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.first, self.second, self.last = (
            nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        )  # fmt: skip

    def forward(self, image, time):
        image = nn.functional.silu(self.first(image)) + self.time(time[:, None] / 1000.0)[:, :, None, None]
        return self.last(nn.functional.silu(self.second(image)))


model = Denoiser().cuda()
shadow = {name: value.detach().clone() for name, value in model.state_dict().items()}
kept = torch.linspace(1 - 1e-4, 1 - 2e-2, 1000).cumprod(0).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
for _ in range(3):
    image = torch.randn(32, 1, 32, 32).cuda()
    time = torch.randint(0, 1000, (32,), device="cuda")
    noise = torch.randn_like(image)
    share = kept[time][:, None, None, None]
    loss = nn.functional.mse_loss(model(share.sqrt() * image + (1 - share).sqrt() * noise, time.float()), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            shadow[name].lerp_(value, 1e-3)
