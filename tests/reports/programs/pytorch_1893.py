# pytorch/pytorch#1893: DataParallel gathers the large outputs of a segmentation on the first GPU, which is full first.
# resolved: compute the loss within the wrapped module; DistributedDataParallel has no such GPU.
# run: --gpu rtx-3060-12gb --gpus 4
# first: does-not-fit | ranks-differ
# fix: DistributedDataParallel | loss in
# not: chunked-loss vocabulary-cap
import torch
from torch import nn


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 150, 1)

    def forward(self, image):
        return self.head(self.conv(image).relu())


model = nn.DataParallel(Segmenter().cuda())  # <- cause
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    images = torch.rand(44, 3, 384, 384).cuda()
    labels = torch.randint(0, 150, (44, 384, 384)).cuda()
    loss = criterion(model(images), labels)  # <- cause
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
