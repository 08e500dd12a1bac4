# JingyunLiang/SwinIR#36: a photo of 1440 x 1080 is made four times larger as a whole.
# resolved: --tile, the photo in tiles.
# run: --gpu rtx-3060-12gb
# first: does-not-fit
# fix: in parts
# also: fragmentation
# not: micro-batch
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(dim, dim, 3, padding=1), nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(F.gelu(self.conv1(x)))


class SuperResolution(nn.Module):
    def __init__(self, dim=96, depth=8, scale=4):
        super().__init__()
        self.first = nn.Conv2d(3, dim, 3, padding=1)
        self.blocks = nn.Sequential(*[Block(dim) for _ in range(depth)])
        self.upsample = nn.Sequential(
            nn.Conv2d(dim, 64 * scale**2, 3, padding=1), nn.PixelShuffle(scale), nn.LeakyReLU()
        )
        self.refine = nn.Conv2d(64, 64, 3, padding=1)
        self.last = nn.Conv2d(64, 3, 3, padding=1)

    def forward(self, x):
        x = self.first(x)
        x = x + self.blocks(x)
        x = self.upsample(x)  # <- cause
        x = F.leaky_relu(self.refine(x))
        return self.last(x)


model = SuperResolution().cuda()
model.eval()
for height, width in [(480, 640), (1080, 1440)]:
    img_lq = torch.rand(1, 3, height, width).cuda()
    with torch.no_grad():
        output = model(img_lq)  # <- cause
    output = output.clamp(0, 1).cpu()
    print(output.shape)
