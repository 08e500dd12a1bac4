# pytorch/pytorch#13613: predictions are joined batch by batch with torch.cat, and memory grows.
# resolved: detach the predictions (or predict under torch.no_grad()).
# run: --gpu rtx-3060-12gb
# first: evaluation-with-gradients | evaluation-accumulates | memory-growth
# fix: no_grad | .detach()
# also: evaluation-accumulates evaluation-with-gradients memory-growth
import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


model = nn.Sequential(
    nn.Conv2d(3, 64, 7, 4, 3),
    *(Residual(64) for _ in range(6)),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 1000),
).cuda()


def predict(model, loader):
    model.eval()
    predicted = torch.empty(0, 1000)
    for images in loader:
        batch = model(images.cuda()).softmax(1)  # <- cause
        predicted = torch.cat((predicted, batch.cpu()))  # <- cause
    return predicted.argmax(1)


loader = (torch.randn(64, 3, 224, 224) for _ in range(60))
print(predict(model, loader).shape)
