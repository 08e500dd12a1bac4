"""A convolutional classifier as in torchvision's references: loaders with workers, AMP, a moving average, metrics."""

import argparse
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=8)
parser.add_argument("--depth", type=int, default=1)
parser.add_argument("--size", type=int, default=32)
parser.add_argument("--classes", type=int, default=10)
parser.add_argument("-b", "--batch-size", type=int, default=4)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--rows", type=int, default=12)
parser.add_argument("-j", "--workers", type=int, default=2)
parser.add_argument("--amp", action="store_true")
parser.add_argument("--channels-last", action="store_true")
parser.add_argument("--ema", action="store_true")
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--device", default="cuda")
parser.add_argument("--output-dir", default="out-images")
args = parser.parse_args()
device = torch.device(args.device)
torch.backends.cudnn.benchmark = True


class Images(Dataset):
    """Pictures that are made up as they are requested."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(3, args.size, args.size, generator=generator)
        if index % 2:
            image = image.flip(-1)
        return (image - 0.5) / 0.25, index % args.classes


class Block(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, width, depth, classes):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        layers, inside = [], width
        for stage in range(3):
            for number in range(depth):
                outside = width * 2**stage
                layers.append(Block(inside, outside, 2 if stage and not number else 1))
                inside = outside
        self.layers = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inside, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        return self.fc(torch.flatten(self.pool(self.layers(self.stem(x))), 1))


def accuracy(output, target, topk=(1,)):
    with torch.inference_mode():
        _, predicted = output.topk(max(topk), 1, True, True)
        correct = predicted.t().eq(target[None])
        return [correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / target.size(0)) for k in topk]


def to_device(image, target):
    image = image.to(device, non_blocking=True)
    if args.channels_last:
        image = image.contiguous(memory_format=torch.channels_last)
    return image, target.to(device, non_blocking=True)


def evaluate(model, loader):
    model.eval()
    losses, top1 = [], []
    with torch.inference_mode():
        for image, target in loader:
            image, target = to_device(image, target)
            output = model(image)
            losses.append(criterion(output, target).item())
            top1.append(accuracy(output, target, topk=(1, 5))[0].item())
    return sum(losses) / len(losses), sum(top1) / len(top1)


torch.manual_seed(0)
loader_options = {"num_workers": args.workers, "pin_memory": True, "persistent_workers": args.workers > 0}
train = DataLoader(Images(args.rows), args.batch_size, shuffle=True, drop_last=True, **loader_options)
test = DataLoader(Images(args.rows // 2), args.batch_size, **loader_options)
model = ResNet(args.width, args.depth, args.classes)
if args.channels_last:
    model = model.to(memory_format=torch.channels_last)
model.to(device)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
scaler = torch.cuda.amp.GradScaler() if args.amp else None
average = None
if args.ema:
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99), use_buffers=True
    )

for epoch in range(args.epochs):
    model.train()
    for number, (image, target) in enumerate(train):
        begin = time.time()
        image, target = to_device(image, target)
        with torch.amp.autocast("cuda", enabled=scaler is not None):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if average is not None:
            average.update_parameters(model)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        torch.cuda.synchronize()
        print(
            f"epoch {epoch} [{number}/{len(train)}] loss {loss.item():.4f} acc {acc1.item():.2f} {acc5.item():.2f} "
            f"img/s {args.batch_size / (time.time() - begin):.0f} max mem {torch.cuda.max_memory_allocated() >> 20}"
        )
    scheduler.step()
    test_loss, test_acc = evaluate(model, test)
    print(f"test: loss {test_loss:.4f} acc1 {test_acc:.2f}")
    os.makedirs(args.output_dir, exist_ok=True)
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "scaler": scaler.state_dict() if scaler else None,
            "epoch": epoch,
            "args": args,
        },
        os.path.join(args.output_dir, "checkpoint.pth"),
    )
checkpoint = torch.load(os.path.join(args.output_dir, "checkpoint.pth"), map_location="cpu", weights_only=False)
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
