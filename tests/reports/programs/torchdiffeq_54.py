# rtqichen/torchdiffeq#54: the graph of all steps of a solver is kept for the backward.
# resolved: odeint_adjoint, which keeps none.
# run: --gpu rtx-3060-12gb
# first: does-not-fit
# fix: odeint_adjoint
# also: fragmentation
import itertools

import torch
from torch import nn


class Func(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(dim, dim, 3, padding=1), nn.Softplus(), nn.Conv2d(dim, dim, 3, padding=1), nn.Tanh()
        )

    def forward(self, t, y):
        return self.net(y)  # <- cause


def odeint(func, y, times):
    out = [y]
    for t, t_next in itertools.pairwise(times):
        dt = t_next - t
        k1 = func(t, y)
        k2 = func(t + dt / 2, y + dt * k1 / 2)
        k3 = func(t + dt / 2, y + dt * k2 / 2)
        k4 = func(t_next, y + dt * k3)
        y = y + dt * (k1 + 2 * k2 + 2 * k3 + k4) / 6
        out.append(y)
    return torch.stack(out)


class ODENet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, 2, 1)
        self.func = Func()
        self.head = nn.Linear(64, 10)
        self.times = [i / 60 for i in range(61)]

    def forward(self, x):
        y0 = self.stem(x)
        states = odeint(self.func, y0, self.times)
        return self.head(states[-1].mean(dim=(2, 3)))


model = ODENet().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(3):
    x, label = torch.randn(64, 3, 64, 64, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
    loss = nn.functional.cross_entropy(model(x), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
