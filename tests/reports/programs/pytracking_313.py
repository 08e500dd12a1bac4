# visionml/pytracking#313: meters of a trainer add up losses that still have their graphs.
# resolved: give them numbers: val.item(), if it is a tensor.
# run: --gpu rtx-3060-12gb
# first: memory-growth
# fix: .item() | .detach()
import torch
from torch import nn


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, count):
        self.sum = self.sum + value * count  # <- cause
        self.count += count


class Trainer:
    def __init__(self):
        self.net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 1, 3)).cuda()
        self.optimizer = torch.optim.Adam(self.net.parameters())
        self.stats = {}

    def update_stats(self, new, batch_size):
        for name, value in new.items():
            self.stats.setdefault(name, AverageMeter()).update(value, batch_size)

    def cycle(self, batches):
        for _ in range(batches):
            image = torch.rand(16, 3, 128, 128, device="cuda")
            score = self.net(image)
            losses = {"loss/total": score.square().mean(), "loss/peak": score.amax()}
            self.optimizer.zero_grad()
            losses["loss/total"].backward()
            self.optimizer.step()
            self.update_stats(losses, 16)


Trainer().cycle(80)
