# Project-MONAI/MONAI#6427: a sliding window over a volume sums the chances of 100 classes in a buffer on the GPU.
# resolved: the buffer on the CPU (device="cpu"), or an argmax of each slab.
# run: --gpu rtx-3060-12gb
# first: does-not-fit
# fix: in parts | host memory | to the CPU
# not: micro-batch activation-checkpointing
import itertools

import torch
from torch import nn

CLASSES, SIZE, WINDOW = 100, (384, 384, 256), 128


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv3d(1, 8, 3, padding=1), nn.Conv3d(8, CLASSES, 1)

    def forward(self, volume):
        return self.head(self.conv(volume).relu())


def slide(volume, model):
    total = torch.zeros(1, CLASSES, *SIZE, device="cuda")  # <- cause
    count = torch.zeros(1, 1, *SIZE, device="cuda")
    for start in itertools.product(*(range(0, size, WINDOW) for size in SIZE)):
        part = (..., *(slice(begin, begin + WINDOW) for begin in start))
        total[part] += model(volume[part])
        count[part] += 1
    return (total / count).argmax(1)


model = Segmenter().eval().cuda()
with torch.no_grad():
    print(slide(torch.rand(1, 1, *SIZE, device="cuda"), model).shape)
