# facebookresearch/fairchem#2099: each row of a Hessian keeps a graph for third derivatives, which nobody takes.
# resolved: create_graph=False for the rows; the forces alone need it.
# run: --gpu rtx-3060-12gb
# first: memory-growth | does-not-fit
# fix: create_graph
# not: micro-batch
import torch
from torch import nn

ATOMS, WIDTH = 150, 256


class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        self.basis = nn.Linear(16, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.out = nn.Linear(WIDTH, 1)
        self.register_buffer("centers", torch.linspace(0, 6, 16))

    def forward(self, positions):
        distance = (positions[:, None] - positions[None]).pow(2).sum(-1).add(1e-6).sqrt()
        x = self.basis(torch.exp(-((distance[..., None] - self.centers) ** 2)))
        for layer in self.layers:
            x = x + torch.nn.functional.silu(layer(x))
        return self.out(x).sum()


def hessian_by_rows(forces, positions):
    rows = []
    for force in -forces.flatten():
        (row,) = torch.autograd.grad(force, positions, retain_graph=True, create_graph=True)  # <- cause
        rows.append(row.flatten())
    return torch.stack(rows)


def predict(model, positions):
    positions.requires_grad_(True)
    energy = model(positions)
    (gradient,) = torch.autograd.grad(energy, positions, create_graph=True)
    hessian = hessian_by_rows(-gradient, positions)
    return energy.item(), hessian.detach().cpu()


model = Potential().cuda().eval().requires_grad_(False)
for _ in range(2):
    energy, hessian = predict(model, torch.rand(ATOMS, 3, device="cuda") * 8)
    print(energy, hessian.shape)
