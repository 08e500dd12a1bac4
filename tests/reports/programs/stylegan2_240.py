# lucidrains/stylegan2-pytorch#240: every eighth step regularizes path lengths, with a graph of gradients.
# resolved: a smaller batch for the penalty
# run: --gpu rtx-3080
# first: later-step | does-not-fit
# fix: part of the batch
# also: fragmentation
import torch
from torch import nn
from torch.nn import functional as F


class Generator(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.mapping = nn.Sequential(nn.Linear(dim, dim), nn.LeakyReLU(0.2), nn.Linear(dim, dim))
        self.start = nn.Parameter(torch.randn(1, dim, 4, 4))
        self.styles = nn.ModuleList([nn.Linear(dim, dim) for _ in range(5)])
        self.convs = nn.ModuleList([nn.Conv2d(dim, dim, 3, padding=1) for _ in range(5)])
        self.to_rgb = nn.Conv2d(dim, 3, 1)

    def forward(self, w):
        x = self.start.expand(len(w), -1, -1, -1)
        for style, conv in zip(self.styles, self.convs, strict=True):
            x = F.interpolate(x, scale_factor=2, mode="bilinear")
            x = F.leaky_relu(conv(x * style(w)[:, :, None, None]), 0.2)
        return self.to_rgb(x)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 64, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(64, 128, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.LazyLinear(1),
        )

    def forward(self, x):
        return self.net(x)


def pl_penalty(images, styles):
    noise = torch.randn(images.shape, device=images.device) / (images.shape[2] * images.shape[3]) ** 0.5
    outputs = (images * noise).sum()
    grads = torch.autograd.grad(outputs=outputs, inputs=styles, create_graph=True)[0]  # <- cause
    lengths = grads.square().sum(1).sqrt()
    return (lengths - lengths.mean().detach()).square().mean()


G, D = Generator().cuda(), Discriminator().cuda()
D(torch.zeros(1, 3, 128, 128, device="cuda"))
opt_g, opt_d = torch.optim.Adam(G.parameters(), lr=2e-4), torch.optim.Adam(D.parameters(), lr=2e-4)
for step in range(17):
    real, z = torch.rand(48, 3, 128, 128, device="cuda"), torch.randn(48, 256, device="cuda")
    with torch.no_grad():
        fake = G(G.mapping(z))
    loss_d = F.relu(1 - D(real)).mean() + F.relu(1 + D(fake)).mean()
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()
    w = G.mapping(torch.randn(48, 256, device="cuda"))
    images = G(w)
    loss = -D(images).mean()
    if step % 8 == 7:
        loss = loss + pl_penalty(images, w)
    opt_g.zero_grad()
    loss.backward()
    opt_g.step()
