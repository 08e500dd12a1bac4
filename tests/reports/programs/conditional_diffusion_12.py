# TeaPearce/Conditional_Diffusion_MNIST#12: the sampling loop keeps what every step has made.
# resolved: sampling under torch.no_grad()
# run: --gpu rtx-4090
# first: evaluation-with-gradients
# fix: torch.no_grad()
import torch
import torch.nn as nn
import torch.nn.functional as F


class Eps(nn.Module):
    def __init__(self, c=128):
        super().__init__()
        self.t = nn.Embedding(400, c)
        self.i = nn.Conv2d(3, c, 3, padding=1)
        self.b = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, c), nn.SiLU(), nn.Conv2d(c, c, 3, padding=1)) for _ in range(6)
        )
        self.o = nn.Conv2d(c, 3, 3, padding=1)

    def forward(self, x, t):
        h = self.i(x) + self.t(t)[:, :, None, None]
        for b in self.b:
            h = h + b(h)
        return self.o(h)


class DDPM(nn.Module):
    def __init__(self, steps=400):
        super().__init__()
        self.model, self.T = Eps(), steps
        beta = torch.linspace(1e-4, 0.02, steps)
        self.register_buffer("beta", beta)
        self.register_buffer("ab", torch.cumprod(1 - beta, 0))

    def forward(self, x):
        t = torch.randint(0, self.T, (len(x),), device=x.device)
        n = torch.randn_like(x)
        a = self.ab[t][:, None, None, None]
        return F.mse_loss(self.model(a.sqrt() * x + (1 - a).sqrt() * n, t), n)

    def sample(self, n):
        x = torch.randn(n, 3, 64, 64, device=self.beta.device)
        for k in reversed(range(self.T)):
            t = torch.full((n,), k, device=x.device)
            eps = self.model(x, t)  # <- cause
            x = (x - self.beta[k] / (1 - self.ab[k]).sqrt() * eps) / (1 - self.beta[k]).sqrt()
            if k > 0:
                x = x + self.beta[k].sqrt() * torch.randn_like(x)
        return x


ddpm = DDPM().cuda()
opt = torch.optim.Adam(ddpm.parameters(), lr=1e-4)
for epoch in range(3):
    for _ in range(3):
        loss = ddpm(torch.randn(32, 3, 64, 64).cuda())
        opt.zero_grad()
        loss.backward()
        opt.step()
    ddpm.eval()
    images = ddpm.sample(16)
    ddpm.train()
    print(epoch, loss.item(), images.shape)
