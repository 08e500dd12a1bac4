"""Pictures enlarged: inputs and targets are moved to the GPU in one line, an error is measured afterwards."""

from math import log10

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda")
model = nn.Sequential(nn.Conv2d(1, 64, 5, padding=2), nn.ReLU(), nn.Conv2d(64, 9, 3, padding=1), nn.PixelShuffle(3)).to(
    device
)
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.rand(12, 1, 64, 64), torch.rand(12, 1, 192, 192)), batch_size=4, shuffle=True)
total = 0.0
for batch in loader:
    optimizer.zero_grad()
    picture, target = batch[0].to(device), batch[1].to(device)
    loss = criterion(model(picture), target)
    total += loss.item()
    loss.backward()
    optimizer.step()
with torch.no_grad():
    for batch in loader:
        picture, target = batch[0].to(device), batch[1].to(device)
        print(10 * log10(1 / criterion(model(picture), target).item()))
