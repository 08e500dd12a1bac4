# yunjey/pytorch-tutorial#56: the discriminator's loss is computed of images that have the generator's graph.
# resolved: G(z).detach() for the discriminator.
# run: --gpu-vram 2.9
# first: untrained-gradients | does-not-fit | evaluation-with-gradients
# fix: .detach()
# also: fragmentation
import torch
from torch import nn

BATCH = 192


def block(a, b):
    return [nn.Upsample(scale_factor=2), nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]


G = nn.Sequential(
    nn.Linear(128, 256 * 64),
    nn.Unflatten(1, (256, 8, 8)),
    *block(256, 256),
    *block(256, 128),
    *block(128, 64),
    nn.Conv2d(64, 3, 3, padding=1),
    nn.Tanh(),
).cuda()
D = nn.Sequential(
    nn.Conv2d(3, 64, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(64, 128, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(128, 256, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Flatten(),
    nn.Linear(256 * 64, 1),
    nn.Sigmoid(),
).cuda()
criterion = nn.BCELoss()
d_optimizer = torch.optim.Adam(D.parameters(), lr=3e-4)
g_optimizer = torch.optim.Adam(G.parameters(), lr=3e-4)


def reset_grad():
    d_optimizer.zero_grad()
    g_optimizer.zero_grad()


real_labels, fake_labels = torch.ones(BATCH, 1, device="cuda"), torch.zeros(BATCH, 1, device="cuda")
for step in range(6):
    images = torch.randn(BATCH, 3, 64, 64, device="cuda")
    d_loss_real = criterion(D(images), real_labels)
    z = torch.randn(BATCH, 128, device="cuda")
    fake_images = G(z)  # <- cause
    d_loss_fake = criterion(D(fake_images), fake_labels)  # <- cause
    d_loss = d_loss_real + d_loss_fake
    reset_grad()
    d_loss.backward()
    d_optimizer.step()

    if step % 3 == 2:
        small = G(torch.randn(BATCH // 2, 128, device="cuda"))
        g_loss = criterion(D(small), real_labels[: BATCH // 2])
        reset_grad()
        g_loss.backward()
        g_optimizer.step()
