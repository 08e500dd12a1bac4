# yenchenlin/nerf-pytorch#23: the rays of all images lie on the GPU, of which a step takes 4096.
# resolved: rays stay on the CPU, and each batch of them goes to the GPU.
# run: --gpu v100-16gb
# first: does-not-fit | loaded-ahead | idle-memory
# fix: .cpu() | host memory | on the CPU | to the CPU
import torch
from torch import nn


class Nerf(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(63, width)] + [nn.Linear(width, width) for _ in range(7)])
        self.out = nn.Linear(width, 4)

    def forward(self, points):
        powers = 2.0 ** torch.arange(10, device=points.device)
        angles = (points[..., None, :] * powers[:, None]).flatten(-2)
        x = torch.cat([points, angles.sin(), angles.cos()], -1)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.out(x)


def make_rays(images, height, width):
    """Origins, directions and colors."""
    return torch.rand(images * height * width, 3, 3)


def render(model, rays, samples):
    origin, direction = rays[:, 0], rays[:, 1]
    depth = torch.linspace(2, 6, samples, device=rays.device)
    raw = model(origin[:, None] + direction[:, None] * depth[:, None])
    weight = torch.softmax(raw[..., 3], -1)
    return (weight[..., None] * raw[..., :3].sigmoid()).sum(1)


model = Nerf().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
rays = make_rays(400, 756, 1008)
rays = rays.cuda()  # <- cause
for step in range(20):
    batch = rays[step * 4096 : (step + 1) * 4096]
    color = render(model, batch, 64 + 128)
    loss = (color - batch[:, 2]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
