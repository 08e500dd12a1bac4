# pytorch/pytorch#2225: [N, 1, 1] plus [N, 1] is [N, N, 1], for dimensions are aligned from the right.
# resolved: both of one shape: squeeze(-1) or view before the sum.
# run: --gpu rtx-3060-12gb
# first: column-with-row | does-not-fit
# fix: squeeze | view( | reshape
# not: micro-batch chunked-loss
import torch
from torch import nn

SENSORS = 60_000


class Calibration(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Sequential(nn.Conv1d(8, 32, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Conv1d(32, 1, 1))
        self.offset = nn.Parameter(torch.zeros(SENSORS, 1))

    def forward(self, signal):
        gain = self.filter(signal)  # [sensors, 1, 1]
        return gain + self.offset  # <- cause


def main():
    model = Calibration().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    target = torch.randn(SENSORS, 1, device="cuda")
    for epoch in range(5):
        signal = torch.randn(SENSORS, 8, 32, device="cuda")
        reading = model(signal).flatten(1).mean(1, keepdim=True)
        loss = (reading - target).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(epoch, loss.item())


main()
