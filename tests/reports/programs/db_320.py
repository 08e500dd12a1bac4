# MhLiao/DB#320: images of a validation are not cropped, and its batch is that of training.
# resolved: a smaller batch for the validation
# run: --gpu rtx-2080-ti
# first: evaluation-batch
# fix: samples at a time
# also: fragmentation
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Text(Dataset):
    def __init__(self, n, size):
        self.n, self.size = n, size

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.rand(3, *self.size)


def conv(a, b, s=1):
    return nn.Sequential(nn.Conv2d(a, b, 3, s, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


class DB(nn.Module):
    def __init__(self, w=64):
        super().__init__()
        self.c2, self.c3, self.c4 = (
            nn.Sequential(conv(3, w, 2), conv(w, w, 2)),
            conv(w, 2 * w, 2),
            conv(2 * w, 4 * w, 2),
        )
        self.in2, self.in3, self.in4 = nn.Conv2d(w, 256, 1), nn.Conv2d(2 * w, 256, 1), nn.Conv2d(4 * w, 256, 1)
        self.fuse = conv(768, 256)
        self.binarize = nn.Sequential(
            nn.ConvTranspose2d(256, 64, 2, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.ConvTranspose2d(64, 1, 2, 2)
        )

    def forward(self, x):
        c2 = self.c2(x)
        c3 = self.c3(c2)
        c4 = self.c4(c3)
        maps = [F.interpolate(p, size=c2.shape[-2:]) for p in (self.in2(c2), self.in3(c3), self.in4(c4))]
        return torch.sigmoid(self.binarize(self.fuse(torch.cat(maps, 1))))


def validate(model, loader):
    model.eval()
    boxes = []
    with torch.no_grad():
        for batch in loader:
            pred = model(batch.cuda())  # <- cause
            boxes.append((pred > 0.3).flatten(1).sum(1).cpu())
    model.train()
    return torch.cat(boxes)


model = DB().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.007, momentum=0.9)
train_loader, val_loader = (
    DataLoader(Text(96, (640, 640)), batch_size=24),
    DataLoader(Text(48, (1152, 2048)), batch_size=24),
)
for epoch in range(2):
    for batch in train_loader:
        loss = F.binary_cross_entropy(
            model(batch[..., ::1].cuda()[..., :320, :320]), torch.zeros(len(batch), 1, 320, 320, device="cuda")
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item(), validate(model, val_loader).shape)
