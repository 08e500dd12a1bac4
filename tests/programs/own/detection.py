"""A head of detection: boxes of all cells, matched with those of the image, and a focal loss."""

import torch
from torch import nn


class Detector(nn.Module):
    def __init__(self, classes=20):
        super().__init__()
        self.classes = classes
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(64, 128, 3, 2, 1),
            nn.ReLU(),
        )
        self.classify, self.place = nn.Conv2d(128, classes, 3, padding=1), nn.Conv2d(128, 4, 3, padding=1)

    def forward(self, images):
        maps = self.backbone(images)
        scores = self.classify(maps).flatten(2).transpose(1, 2)
        return scores, self.place(maps).flatten(2).transpose(1, 2).exp()


def overlap(boxes, others):
    low, high = torch.max(boxes[:, None, :2], others[:, :2]), torch.min(boxes[:, None, 2:], others[:, 2:])
    shared = (high - low).clamp(min=0).prod(2)
    area = [(each[:, 2:] - each[:, :2]).prod(1) for each in (boxes, others)]
    return shared / (area[0][:, None] + area[1] - shared)


model = Detector().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for _ in range(3):
    images = torch.randn(4, 3, 256, 256).cuda()
    truth = [
        (torch.rand(count, 4).cuda() + torch.tensor([0, 0, 1, 1]).cuda(), torch.randint(0, 20, (count,)).cuda())
        for count in (1, 3, 2, 5)
    ]
    scores, boxes = model(images)
    loss = torch.zeros((), device="cuda")
    for score, box, (wanted, labels) in zip(scores, boxes, truth, strict=True):
        best, which = overlap(box.detach(), wanted).max(1)
        near = best > 0.5
        target = torch.zeros_like(score)
        target[near, labels[which[near]]] = 1.0
        share = score.sigmoid()
        weight = torch.where(target > 0, 1 - share, share).detach() ** 2
        loss = loss + (weight * nn.functional.binary_cross_entropy_with_logits(score, target, reduction="none")).sum()
        loss = loss + nn.functional.smooth_l1_loss(box[near], wanted[which[near]], reduction="sum")
    optimizer.zero_grad()
    (loss / 4).backward()
    optimizer.step()
