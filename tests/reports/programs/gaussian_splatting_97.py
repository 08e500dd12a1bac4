# hbb1/2d-gaussian-splatting#97: the images of all cameras are on the GPU.
# resolved: --data_device cpu.
# run: --gpu rtx-3070
# first: loaded-ahead
# fix: .cpu() | in host memory
# also: fragmentation optimizer-step-temporaries
# not: micro-batch
import random

import torch
from torch import nn
from torch.nn import functional as F


class Camera:
    def __init__(self, uid, image, data_device="cuda"):
        self.uid = uid
        self.original_image = image.to(data_device)  # <- cause
        self.world_view = torch.eye(4).to(data_device)


class Scene:
    def __init__(self, num_images, height, width):
        self.cameras = [Camera(i, torch.rand(3, height, width)) for i in range(num_images)]


class Gaussians(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.xyz = nn.Parameter(torch.randn(n, 3))
        self.features = nn.Parameter(torch.randn(n, 48))
        self.scaling = nn.Parameter(torch.randn(n, 3))
        self.opacity = nn.Parameter(torch.randn(n, 1))


def render(camera, gaussians):
    _, h, w = camera.original_image.shape
    points = torch.cat([gaussians.xyz, torch.ones_like(gaussians.opacity)], dim=1) @ camera.world_view
    pixel = ((points[:, 0].sigmoid() * (w - 1)).long() + w * (points[:, 1].sigmoid() * (h - 1)).long()).clamp(
        0, h * w - 1
    )
    color = (
        gaussians.features[:, :3].sigmoid()
        * gaussians.opacity.sigmoid()
        * gaussians.scaling.exp().mean(1, keepdim=True)
    )
    image = torch.zeros(h * w, 3, device=color.device).index_add(0, pixel, color)
    return image.view(h, w, 3).permute(2, 0, 1)


scene = Scene(230, 1080, 1920)
gaussians = Gaussians(2_000_000).cuda()
optimizer = torch.optim.Adam(gaussians.parameters(), lr=1e-3, eps=1e-15)
for iteration in range(8):
    camera = random.choice(scene.cameras)
    image = render(camera, gaussians)
    loss = F.l1_loss(image, camera.original_image.cuda())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
