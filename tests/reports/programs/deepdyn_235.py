# sraashis/deepdyn#235: a target network is called with gradients, which no optimizer uses.
# resolved: the forward under torch.no_grad().
# run: --gpu-vram 1.9
# first: untrained-gradients
# fix: call it under torch.no_grad()
import copy

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, a, b, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
        self.conv2, self.bn2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
        self.skip = nn.Conv2d(a, b, 1, stride)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.skip(x))


def encoder():
    layers = [nn.Conv2d(3, 64, 3, 1, 1), nn.ReLU()]
    for a, b, s in [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]:
        layers += [Residual(a, b, s), Residual(b, b, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 256))


class BYOL(nn.Module):
    def __init__(self, tau=0.99):
        super().__init__()
        self.online = encoder()
        self.predictor = nn.Sequential(nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 256))
        self.target = copy.deepcopy(self.online)
        self.tau = tau

    def regression(self, p, z):
        return 2 - 2 * F.cosine_similarity(p, z.detach()).mean()

    def forward(self, v1, v2):
        p1, p2 = self.predictor(self.online(v1)), self.predictor(self.online(v2))
        t1, t2 = self.target(v1), self.target(v2)  # <- cause
        return self.regression(p1, t2) + self.regression(p2, t1)

    def update(self):
        for a, b in zip(self.online.parameters(), self.target.parameters(), strict=True):
            b.data.mul_(self.tau).add_(a.data, alpha=1 - self.tau)


def augment(images):
    return images + 0.1 * torch.randn_like(images)


model = BYOL().cuda()
optimizer = torch.optim.SGD([*model.online.parameters(), *model.predictor.parameters()], lr=0.05, momentum=0.9)
for step in range(200):
    images = torch.rand(96, 3, 32, 32).cuda()
    loss = model(augment(images), augment(images))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.update()
    print(step, loss.item())
