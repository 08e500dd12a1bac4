# NVlabs/NVAE#24: one image does not fit in eval mode, for its decoder's results are kept for a backward.
# resolved: call the model under torch.no_grad().
# run: --gpu v100-16gb
# first: evaluation-with-gradients
# fix: torch.no_grad()
# not: micro-batch activation-checkpointing
import torch
from torch import nn


class Cell(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(width),
            nn.Conv2d(width, 6 * width, 1),
            nn.BatchNorm2d(6 * width),
            nn.SiLU(),
            nn.Conv2d(6 * width, 6 * width, 5, padding=2, groups=6 * width),
            nn.BatchNorm2d(6 * width),
            nn.SiLU(),
            nn.Conv2d(6 * width, width, 1),
        )

    def forward(self, x):
        return x + 0.1 * self.layers(x)


class Autoencoder(nn.Module):
    def __init__(self, width=64, depth=28):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.tower = nn.ModuleList(Cell(width) for _ in range(depth))
        self.image = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x):
        x = self.stem(x)
        for cell in self.tower:
            x = cell(x)
        return self.image(x)


model = Autoencoder().cuda().eval()
picture = torch.rand(1, 3, 256, 256, device="cuda")
print(model(picture).shape)  # <- cause
