# MIC-DKFZ/nnUNet#34: the checkpoints of all folds are on the GPU in inference.
# resolved: they are loaded to the CPU, and one at a time is moved.
# run: --gpu-vram 7
# first: idle-memory
# fix: map_location="cpu"
# also: fragmentation evaluation-batch
import os
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

FOLDS, CLASSES = 5, 14


class UNet3D(nn.Module):
    def __init__(self, base=48):
        super().__init__()
        widths = [base * 2**i for i in range(5)]
        self.down = nn.ModuleList()
        previous = 1
        for w in widths:
            self.down.append(
                nn.Sequential(
                    nn.Conv3d(previous, w, 3, padding=1),
                    nn.InstanceNorm3d(w),
                    nn.LeakyReLU(inplace=True),
                    nn.Conv3d(w, w, 3, padding=1),
                    nn.InstanceNorm3d(w),
                    nn.LeakyReLU(inplace=True),
                )
            )
            previous = w
        self.up = nn.ModuleList(
            [nn.Conv3d(a + b, b, 3, padding=1) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True)]
        )
        self.head = nn.Conv3d(base, CLASSES, 1)

    def forward(self, x):
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool3d(x, 2)
        x = skips.pop()
        for conv, skip in zip(self.up, reversed(skips), strict=True):
            x = F.leaky_relu(conv(torch.cat([F.interpolate(x, scale_factor=2), skip], 1)))
        return self.head(x)


folder = tempfile.mkdtemp()
paths = []
for fold in range(FOLDS):
    network = UNet3D().cuda()
    optimizer = torch.optim.SGD(network.parameters(), 1e-2, momentum=0.99)
    network(torch.randn(1, 1, 32, 32, 32, device="cuda")).mean().backward()
    optimizer.step()
    paths.append(os.path.join(folder, f"fold_{fold}.model"))
    torch.save({"state_dict": network.state_dict(), "optimizer_state_dict": optimizer.state_dict()}, paths[-1])
    del network, optimizer


class Predictor:
    def __init__(self, paths):
        self.network = UNet3D().cuda().eval()
        self.all_params = []
        for path in paths:
            self.all_params.append(torch.load(path))  # <- cause

    @torch.no_grad()
    def predict(self, volume):
        result = None
        for params in self.all_params:
            self.network.load_state_dict(params["state_dict"])
            softmax = torch.zeros(CLASSES, *volume.shape[1:])
            for z in range(0, volume.shape[1] - 127, 64):
                patch = volume[None, :, z : z + 128, :160, :160].cuda()
                softmax[:, z : z + 128, :160, :160] += self.network(patch)[0].softmax(0).cpu()
            result = softmax if result is None else result + softmax
        return result.argmax(0)


predictor = Predictor(paths)
for case in range(2):
    print(case, predictor.predict(torch.randn(1, 256, 160, 160)).shape)
