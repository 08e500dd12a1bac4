"""denoising-diffusion-pytorch, as its README trains it."""

import torch
from denoising_diffusion_pytorch import GaussianDiffusion, Unet

model = Unet(dim=64, dim_mults=(1, 2, 4, 8), flash_attn=True)
diffusion = GaussianDiffusion(model, image_size=128, timesteps=1000).cuda()
optimizer = torch.optim.Adam(diffusion.parameters(), lr=8e-5)
for _ in range(3):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = diffusion(torch.rand(4, 3, 128, 128).cuda())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
