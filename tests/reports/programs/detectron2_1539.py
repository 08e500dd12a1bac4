# facebookresearch/detectron2#1539: a prediction of twenty images at once keeps gradients.
# resolved: torch.no_grad(), and the images one by one
# run: --gpu rtx-3060-12gb
# first: evaluation-with-gradients
# fix: no_grad
# also: fragmentation
# not: micro-batch
import torch
from torch import nn
from torch.nn import functional as F


def block(a, b, s):
    return nn.Sequential(
        nn.Conv2d(a, b, 3, s, 1), nn.BatchNorm2d(b), nn.ReLU(), nn.Conv2d(b, b, 3, 1, 1), nn.BatchNorm2d(b), nn.ReLU()
    )


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([block(3, 64, 2), block(64, 128, 2), block(128, 256, 2), block(256, 512, 2)])
        self.lateral = nn.ModuleList([nn.Conv2d(c, 256, 1) for c in (64, 128, 256, 512)])
        self.cls, self.box = nn.Conv2d(256, 80, 3, padding=1), nn.Conv2d(256, 4, 3, padding=1)

    def forward(self, images):
        x, maps = images, []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        top, out = None, []
        for feature, lateral in zip(reversed(maps), reversed(self.lateral), strict=True):
            top = lateral(feature) if top is None else lateral(feature) + F.interpolate(top, size=feature.shape[-2:])
            out.append((self.cls(top).sigmoid().flatten(2).amax(1), self.box(top).flatten(2)))
        return torch.cat([scores for scores, _ in out], 1), torch.cat([boxes for _, boxes in out], 2)


model = Detector().cuda()
model.train(False)
image = torch.rand(3, 800, 1216)
images = torch.stack([image for _ in range(20)]).cuda()
predictions = model(images)  # <- cause
scores, index = predictions[0].topk(100, dim=1)
print(scores.shape, predictions[1].gather(2, index.unsqueeze(1).expand(-1, 4, -1)).shape)
