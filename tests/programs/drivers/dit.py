"""DiT-S/4, trained as its train.py does without its latents and processes."""

from copy import deepcopy

import torch
from diffusion import create_diffusion
from models import DiT_models

model = DiT_models["DiT-S/4"](input_size=32, num_classes=1000).cuda()
ema = deepcopy(model).cuda().requires_grad_(False).eval()
diffusion = create_diffusion(timestep_respacing="")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
model.train()
for _ in range(3):
    latents, labels = torch.randn(16, 4, 32, 32).cuda(), torch.randint(0, 1000, (16,)).cuda()
    times = torch.randint(0, diffusion.num_timesteps, (16,), device="cuda")
    loss = diffusion.training_losses(model, latents, times, {"y": labels})["loss"].mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
            average.mul_(0.9999).add_(parameter.data, alpha=0.0001)
