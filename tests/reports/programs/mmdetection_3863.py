# open-mmlab/mmdetection#3863: overlaps of all boxes of an image with all anchors do not fit for 3000 boxes.
# resolved: gpu_assign_thr, above which boxes are assigned on the CPU; others compare them in parts.
# run: --gpu rtx-2080-ti
# first: does-not-fit
# fix: in parts | in chunks | on the CPU | to the CPU | host memory
# not: micro-batch activation-checkpointing chunked-loss
import torch
from torch import nn


def overlaps(a, b):
    """IoU of boxes [N, 4] with anchors [M, 4]."""
    left = torch.max(a[:, None, :2], b[None, :, :2])  # <- cause
    right = torch.min(a[:, None, 2:], b[None, :, 2:])  # <- cause
    inside = (right - left).clamp(min=0)  # <- cause
    shared = inside[..., 0] * inside[..., 1]
    area_a = (a[:, 2:] - a[:, :2]).prod(-1)
    area_b = (b[:, 2:] - b[:, :2]).prod(-1)
    return shared / (area_a[:, None] + area_b[None] - shared).clamp(min=1e-6)


def assign(anchors, boxes):
    iou = overlaps(boxes, anchors)
    best, which = iou.max(0)
    return torch.where(best > 0.5, which, -1)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 64, 7, 4, 3), nn.ReLU(), nn.Conv2d(64, 64, 3, 2, 1), nn.ReLU())
        self.score = nn.Conv2d(64, 9, 1)

    def forward(self, image):
        return self.score(self.body(image)).flatten(1)


def make_boxes(count, size):
    corner = torch.rand(count, 2, device="cuda") * size
    return torch.cat([corner, corner + 1 + torch.rand(count, 2, device="cuda") * 64], 1)


head = Head().cuda()
optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
for boxes in (60, 250, 40, 4000):
    scores = head(torch.randn(1, 3, 1024, 1024, device="cuda"))
    anchors = make_boxes(scores.shape[1], 1024)
    with torch.no_grad():
        target = (assign(anchors, make_boxes(boxes, 1024)) >= 0).float()
    loss = nn.functional.binary_cross_entropy_with_logits(scores[0], target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
