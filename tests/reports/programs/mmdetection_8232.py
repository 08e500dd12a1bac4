# open-mmlab/mmdetection#8232: masks of 28 x 28 are pasted into images of 8000 x 4000, all instances at once.
# resolved: paste them in parts, or on the CPU, or not at the full size.
# run: --gpu rtx-3070
# first: does-not-fit
# fix: in parts | in chunks
# not: micro-batch
import torch
from torch import nn
from torch.nn import functional as F

HEIGHT, WIDTH = 8000, 4000


class MaskHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(256, 1, 1)

    def forward(self, features):
        return self.conv(features).sigmoid()


def paste(masks, boxes):
    x0, y0, x1, y1 = boxes.split(1, dim=1)
    ys = (torch.arange(HEIGHT, device="cuda") + 0.5 - y0) / (y1 - y0) * 2 - 1
    xs = (torch.arange(WIDTH, device="cuda") + 0.5 - x0) / (x1 - x0) * 2 - 1
    count = masks.shape[0]
    gx = xs[:, None, :].expand(count, HEIGHT, WIDTH)
    gy = ys[:, :, None].expand(count, HEIGHT, WIDTH)
    grid = torch.stack([gx, gy], dim=3)  # <- cause
    return F.grid_sample(masks, grid, align_corners=False)[:, 0]  # <- cause


head = MaskHead().cuda().eval()
with torch.no_grad():
    for _ in range(3):
        masks = head(torch.randn(28, 256, 28, 28, device="cuda"))
        boxes = torch.rand(28, 4, device="cuda") * 1000 + torch.tensor([0.0, 0.0, 2000.0, 2000.0], device="cuda")
        full = paste(masks, boxes) > 0.5
        print(full.shape)
