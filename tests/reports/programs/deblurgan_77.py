# KupynOrest/DeblurGAN#77: the network of a perceptual loss is not frozen, and nobody trains it.
# resolved: requires_grad = False for its parameters.
# run: --gpu-vram 2.6
# first: untrained-gradients
# fix: requires_grad_(False)
import torch
from torch import nn


def conv(a, b):
    return [nn.Conv2d(a, b, 3, padding=1), nn.GELU()]


class Perceptual(nn.Module):
    """Like the first layers of VGG19."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            *conv(3, 64),
            *conv(64, 64),
            nn.AvgPool2d(2),
            *conv(64, 128),
            *conv(128, 128),
            nn.AvgPool2d(2),
            *conv(128, 256),
            *conv(256, 256),
            *conv(256, 256),
            nn.AvgPool2d(2),
            *conv(256, 512),
        )

    def forward(self, image):
        return self.net(image)


generator = nn.Sequential(*conv(3, 32), *conv(32, 32), nn.Conv2d(32, 3, 3, padding=1)).cuda()
perceptual = Perceptual().cuda().eval()  # <- cause
optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4)
for step in range(5):
    blurred, sharp = torch.rand(2, 8, 3, 256, 256, device="cuda")
    restored = generator(blurred)
    fake_features = perceptual(restored)  # <- cause
    real_features = perceptual(sharp).detach()  # <- cause
    loss = nn.functional.mse_loss(fake_features, real_features) + nn.functional.l1_loss(restored, sharp)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
