# dunbar12138/DSNeRF#72: rendering an image runs out of memory after a training that did not.
# resolved: smaller --chunk and --netchunk, the rays and points of one call.
# run: --gpu rtx-3060-12gb
# first: does-not-fit | evaluation-batch | larger-batch
# fix: in parts | in chunks | batches of | chunk
# not: activation-checkpointing
import torch
from torch import nn


def make_model(width=256):
    layers = [nn.Linear(63, width), nn.ReLU()]
    for _ in range(7):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 4)).cuda()


def embed(points):
    powers = 2.0 ** torch.arange(10, device=points.device)
    angles = (points[..., None, :] * powers[:, None]).flatten(-2)
    return torch.cat([points, angles.sin(), angles.cos()], -1)


def render_rays(model, rays, samples=192, netchunk=1024 * 1024 * 8):
    depth = torch.linspace(2, 6, samples, device=rays.device)
    points = (rays[:, None, 0] + rays[:, None, 1] * depth[:, None]).flatten(0, 1)
    raw = torch.cat([model(embed(part)) for part in points.split(netchunk)])  # <- cause
    raw = raw.unflatten(0, (-1, samples))
    weight = torch.softmax(raw[..., 3], -1)
    return (weight[..., None] * raw[..., :3].sigmoid()).sum(1)


def render_image(model, height=756, width=1008, chunk=1024 * 32):
    rays = torch.rand(height * width, 2, 3, device="cuda")
    return torch.cat([render_rays(model, part) for part in rays.split(chunk)])  # <- cause


model = make_model()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
for step in range(4):
    loss = render_rays(model, torch.rand(2048, 2, 3, device="cuda")).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
with torch.no_grad():
    print(render_image(model).shape)
