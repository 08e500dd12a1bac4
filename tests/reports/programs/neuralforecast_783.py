# Nixtla/neuralforecast#783: all windows of a series are made, of which 1024 are trained on.
# resolved: fewer windows (step_size), or a shorter series.
# run: --gpu-vram 10
# first: does-not-fit
# fix: the rows of one step
# not: micro-batch
import torch
from torch import nn


class MLP(nn.Module):
    def __init__(self, window, horizon, channels, hidden=512):
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(),
            nn.Linear(window * channels, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, horizon),
        )

    def forward(self, x):
        return self.net(x)


class BaseWindows(nn.Module):
    def __init__(self, input_size=300, horizon=30, channels=14, windows_batch_size=1024, step_size=1):
        super().__init__()
        self.input_size, self.horizon, self.channels = input_size, horizon, channels
        self.windows_batch_size, self.step_size = windows_batch_size, step_size
        self.model = MLP(input_size, horizon, channels)

    def create_windows(self, series):
        window = self.input_size + self.horizon
        windows = series.unfold(0, window, self.step_size).transpose(1, 2)
        windows = windows.reshape(-1, window, self.channels)
        available = windows[:, : self.input_size, -1].sum(-1) > 0
        windows = windows[available]  # <- cause
        chosen = torch.randint(0, len(windows), (self.windows_batch_size,), device=series.device)
        return windows[chosen]

    def training_step(self, series):
        windows = self.create_windows(series)
        mean = windows[:, : self.input_size].mean(1, keepdim=True)
        windows = windows - mean
        forecast = self.model(windows[:, : self.input_size])
        return (forecast - windows[:, self.input_size :, 0]).abs().mean()


series = torch.rand(1_089_214, 14)
model = BaseWindows().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(10):
    loss = model.training_step(series.cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
