# hszhao/semseg#60: a validation keeps gradients, and memory runs out in it after an epoch that trains.
# resolved: model(input) under torch.no_grad()
# run: --gpu-vram 3
# first: evaluation-with-gradients
# fix: no_grad
# also: fragmentation
# not: micro-batch activation-checkpointing
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Scenes(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.rand(3, 473, 473), torch.randint(0, 21, (473, 473))


def block(a, b, stride=1, dilation=1):
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, dilation, dilation, bias=False), nn.BatchNorm2d(b), nn.ReLU())


class PSPNet(nn.Module):
    def __init__(self, classes=21):
        super().__init__()
        self.stem = nn.Sequential(block(3, 64, 2), block(64, 64), block(64, 128, 2))
        self.body = nn.Sequential(*[block(128, 128, dilation=d) for d in (1, 1, 2, 2, 4, 4)])
        self.head = nn.Conv2d(128, classes, 1)
        self.criterion = nn.CrossEntropyLoss(ignore_index=255)

    def forward(self, x, y=None):
        out = F.interpolate(self.head(self.body(self.stem(x))), size=x.shape[-2:], mode="bilinear", align_corners=True)
        if self.training:
            return out.max(1)[1], self.criterion(out, y)
        return out


def train(loader, model, optimizer):
    model.train()
    for input, target in loader:
        input, target = input.cuda(non_blocking=True), target.cuda(non_blocking=True)
        _, loss = model(input, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def validate(loader, model, criterion):
    model.eval()
    hits = total = 0
    for i, (input, target) in enumerate(loader):
        input, target = input.cuda(non_blocking=True), target.cuda(non_blocking=True)
        output = model(input)  # <- cause
        loss = criterion(output, target)
        pred = output.max(1)[1]
        hits += (pred == target).sum().item()
        total += target.numel()
    return loss.item(), hits / total


def main():
    model = PSPNet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train_loader, val_loader = DataLoader(Scenes(64), batch_size=8, shuffle=True), DataLoader(Scenes(32), batch_size=8)
    for epoch in range(2):
        print(epoch, train(train_loader, model, optimizer), validate(val_loader, model, model.criterion))


main()
