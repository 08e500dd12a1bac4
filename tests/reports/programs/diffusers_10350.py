# huggingface/diffusers#10350: decoding latents by a VAE takes 15 GB, for a backward that never comes.
# resolved: under torch.no_grad().
# run: --gpu rtx-4090
# first: evaluation-with-gradients
# fix: no_grad
# also: fragmentation
import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.first, self.second = nn.GroupNorm(32, before), nn.GroupNorm(32, after)
        self.conv, self.conv2 = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def forward(self, x):
        hidden = self.conv(F.silu(self.first(x)))
        return self.skip(x) + self.conv2(F.silu(self.second(hidden)))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Conv2d(4, 512, 3, padding=1)
        self.levels = nn.ModuleList([Residual(512, 512), Residual(512, 512), Residual(512, 256), Residual(256, 128)])
        self.end = nn.Conv2d(128, 3, 3, padding=1)

    def forward(self, latents):
        x = self.start(latents)
        for number, level in enumerate(self.levels):
            x = level(x)
            if number < 3:
                x = F.interpolate(x, scale_factor=2)
        return self.end(x)


vae = Decoder().to("cuda", torch.float16).eval()
latents = torch.randn(4, 4, 96, 96, device="cuda", dtype=torch.float16)
for _ in range(4):
    image = vae(latents / 0.18)  # <- cause
    print(image.shape)
