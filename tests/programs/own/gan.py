"""A GAN: two optimizers, and the discriminator is stepped between making a fake and judging it anew."""

import torch
from torch import nn

device = torch.device("cuda")
generator = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 784), nn.Tanh()).to(device)
discriminator = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1)).to(device)
of_generator = torch.optim.Adam(generator.parameters(), 2e-4, betas=(0.5, 0.999))
of_discriminator = torch.optim.Adam(discriminator.parameters(), 2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
for _ in range(3):
    real = torch.randn(128, 784, device=device)
    ones, zeros = torch.ones(128, 1, device=device), torch.zeros(128, 1, device=device)
    fake = generator(torch.randn(128, 64, device=device))
    of_discriminator.zero_grad()
    loss = criterion(discriminator(real), ones) + criterion(discriminator(fake.detach()), zeros)
    loss.backward()
    of_discriminator.step()
    of_generator.zero_grad()
    fooled = criterion(discriminator(fake), ones)
    fooled.backward()
    of_generator.step()
    print(loss.item(), fooled.item())
