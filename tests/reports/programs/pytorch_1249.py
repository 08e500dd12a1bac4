# pytorch/pytorch#1249: a Dice loss makes one_hot labels, in int64, of a volume with 105 classes.
# resolved: a mask of one class after the other.
# run: --gpu rtx-3060-12gb
# first: does-not-fit
# fix: one class at a time
# also: fragmentation
# not: micro-batch
import torch
from torch import nn
from torch.nn import functional as F


class UNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.enc1 = nn.Sequential(nn.Conv3d(1, 16, 3, padding=1), nn.InstanceNorm3d(16), nn.ReLU(inplace=True))
        self.enc2 = nn.Sequential(nn.Conv3d(16, 64, 3, 2, 1), nn.InstanceNorm3d(64), nn.ReLU(inplace=True))
        self.enc3 = nn.Sequential(nn.Conv3d(64, 128, 3, 2, 1), nn.InstanceNorm3d(128), nn.ReLU(inplace=True))
        self.up2, self.up1 = nn.ConvTranspose3d(128, 64, 2, 2), nn.ConvTranspose3d(64, 16, 2, 2)
        self.out = nn.Conv3d(16, classes, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = self.enc2(a)
        c = self.enc3(b)
        return self.out(self.up1(self.up2(c) + b) + a)


class DiceLoss(nn.Module):
    def forward(self, logits, target):
        num_classes = logits.shape[1]
        probs = logits.softmax(dim=1)
        onehot = F.one_hot(target, num_classes).permute(0, 4, 1, 2, 3).float()  # <- cause
        inter = (probs * onehot).sum(dim=(2, 3, 4))
        union = probs.sum(dim=(2, 3, 4)) + onehot.sum(dim=(2, 3, 4))
        return 1 - ((2 * inter + 1e-5) / (union + 1e-5)).mean()


model = UNet(classes=105).cuda()
criterion = DiceLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.99)
for step in range(3):
    volume = torch.randn(1, 1, 192, 192, 160).cuda()
    target = torch.randint(0, 105, (1, 192, 192, 160)).cuda()
    loss = criterion(model(volume), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
