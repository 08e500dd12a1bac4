# SHI-Labs/OneFormer#87: scores of all classes are resized to an image of 6000 x 4000, before the best is taken.
# resolved: resize the map of classes instead of the scores.
# run: --gpu rtx-4090
# first: does-not-fit
# fix: after argmax
# also: fragmentation
# not: micro-batch amp-bfloat16
import torch
from torch import nn
from torch.nn import functional as F


class Segmenter(nn.Module):
    def __init__(self, classes=150):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 64, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(64, 128, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(128, 256, 3, 1, 1),
            nn.ReLU(),
        )
        self.classifier = nn.Conv2d(256, classes, 1)

    def forward(self, x):
        return self.classifier(self.backbone(x))


def postprocess(logits, height, width):
    logits = F.interpolate(logits, size=(height, width), mode="bilinear", align_corners=False)  # <- cause
    probs = logits.softmax(dim=1)
    scores, labels = probs.max(dim=1)
    labels[scores < 0.3] = 255
    return labels.byte()


model = Segmenter().cuda().eval()
sizes = [(1024, 2048), (3000, 4000), (4000, 6000)]
with torch.inference_mode():
    for height, width in sizes:
        image = torch.rand(1, 3, 640, 960, device="cuda")
        labels = postprocess(model(image), height, width)
        print(labels.shape)
