# chenhsuanlin/bundle-adjusting-NeRF#41: rays of all pixels are computed, of which 1024 are rendered.
# resolved: the rays are chosen before their directions are computed.
# run: --gpu-vram 6
# first: idle-memory
# fix: index first
# also: fragmentation
# not: micro-batch
import torch
from torch import nn


def get_center_and_ray(height, width, poses, intrinsics):
    batch = len(poses)
    y, x = torch.meshgrid(
        torch.arange(height, device=poses.device) + 0.5, torch.arange(width, device=poses.device) + 0.5, indexing="ij"
    )
    grid = torch.stack([x, y, torch.ones_like(x)], dim=-1).view(-1, 3)
    grid_3d = grid[None].repeat(batch, 1, 1)
    grid_3d = grid_3d @ intrinsics.inverse().transpose(-1, -2)
    center = poses[:, None, :, 3].expand_as(grid_3d)
    points = grid_3d @ poses[..., :3].transpose(-1, -2) + center
    return center, points - center


class NeRF(nn.Module):
    def __init__(self, hidden=256):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 4),
        )

    def forward(self, center, ray, samples=64):
        depth = torch.linspace(2, 6, samples, device=ray.device)
        points = center[..., None, :] + ray[..., None, :] * depth[:, None]
        rgb, density = self.net(points).split([3, 1], dim=-1)
        weight = torch.softmax(density, dim=-2)
        return (weight * rgb.sigmoid()).sum(-2)


height, width, views = 1512, 2016, 40
images = torch.rand(views, height * width, 3)
base = torch.cat([torch.eye(3), torch.zeros(3, 1)], dim=1)
pose_noise = nn.Parameter(torch.zeros(views, 3, 4, device="cuda"))
intrinsics = torch.tensor([[1800.0, 0, width / 2], [0, 1800.0, height / 2], [0, 0, 1]], device="cuda").repeat(
    views, 1, 1
)
model = NeRF().cuda()
optimizer = torch.optim.Adam([*model.parameters(), pose_noise], lr=1e-3)

for it in range(10):
    poses = base.cuda() + pose_noise
    center, ray = get_center_and_ray(height, width, poses, intrinsics)  # <- cause
    ray_idx = torch.randperm(height * width)[: 1024 // views]
    rgb = model(center[:, ray_idx.cuda()], ray[:, ray_idx.cuda()])
    loss = ((rgb - images[:, ray_idx].cuda()) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(it, loss.item())
