# eriklindernoren/PyTorch-GAN#71: the buffer of generated images keeps each with the graph that made it.
# resolved: detach what is pushed into the buffer.
# run: --gpu-vram 5
# first: memory-growth
# fix: .detach()
import random

import torch
from torch import nn


class ReplayBuffer:
    def __init__(self, max_size=50):
        self.max_size, self.data = max_size, []

    def push_and_pop(self, images):
        out = []
        for image in images:
            image = image[None]
            if len(self.data) < self.max_size:
                self.data.append(image)  # <- cause
                out.append(image)
            elif random.random() > 0.5:
                index = random.randrange(self.max_size)
                out.append(self.data[index].clone())
                self.data[index] = image
            else:
                out.append(image)
        return torch.cat(out)


def conv(a, b, stride=1):
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1), nn.InstanceNorm2d(b), nn.ReLU())


G = nn.Sequential(
    conv(3, 64),
    conv(64, 128, 2),
    conv(128, 128),
    conv(128, 128),
    nn.Upsample(scale_factor=2),
    nn.Conv2d(128, 3, 3, padding=1),
).cuda()
D = nn.Sequential(conv(3, 64, 2), conv(64, 128, 2), nn.Conv2d(128, 1, 3, padding=1)).cuda()
g_optimizer = torch.optim.Adam(G.parameters(), lr=2e-4)
d_optimizer = torch.optim.Adam(D.parameters(), lr=2e-4)
criterion = nn.MSELoss()
fake_buffer = ReplayBuffer()
for step in range(120):
    real_a, real_b = torch.randn(2, 1, 3, 256, 256, device="cuda")
    g_optimizer.zero_grad()
    fake = G(real_a)
    answer = D(fake)
    g_loss = criterion(answer, torch.ones_like(answer))
    g_loss.backward(retain_graph=True)
    g_optimizer.step()
    d_optimizer.zero_grad()
    old = fake_buffer.push_and_pop(fake)
    right, wrong = D(real_b), D(old.detach())
    d_loss = criterion(right, torch.ones_like(right)) + criterion(wrong, torch.zeros_like(wrong))
    d_loss.backward()
    d_optimizer.step()
