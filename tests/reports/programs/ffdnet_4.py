# Aoi-hosizora/FFDNet_pytorch#4: a validation adds up losses with their graphs.
# resolved: float() of each loss; or the validation under torch.no_grad().
# run: --gpu-vram 4
# first: evaluation-with-gradients
# fix: no_grad
# also: memory-growth evaluation-accumulates
# not: micro-batch
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Patches(Dataset):
    def __init__(self, n, size):
        self.n, self.size = n, size

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.rand(3, self.size, self.size)


class Denoiser(nn.Module):
    def __init__(self, depth=13, width=96):
        super().__init__()
        layers = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU(inplace=True)]
        for _ in range(depth - 2):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        layers.append(nn.Conv2d(width, 3, 3, padding=1))
        self.body = nn.Sequential(*layers)

    def forward(self, x):
        return x - self.body(x)


def main():
    train_loader = DataLoader(Patches(96, 70), batch_size=16, shuffle=True)
    val_loader = DataLoader(Patches(24, 256), batch_size=1)
    model = Denoiser().cuda()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        model.train()
        train_losses = 0
        for image in train_loader:
            image = image.cuda()
            noisy = image + 0.1 * torch.randn_like(image)
            optimizer.zero_grad()
            loss = criterion(model(noisy), image)
            loss.backward()
            optimizer.step()
            train_losses += loss.item()
        model.eval()
        val_losses = 0
        for image in val_loader:
            image = image.cuda()
            noisy = image + 0.1 * torch.randn_like(image)
            denoised = model(noisy)  # <- cause
            val_losses += criterion(denoised, image)  # <- cause
        print(epoch, train_losses / len(train_loader), val_losses / len(val_loader))


main()
