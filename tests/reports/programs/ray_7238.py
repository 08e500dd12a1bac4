# ray-project/ray#7238: values of a rollout are kept with the graphs of the calls that estimated them.
# resolved: estimate advantages under torch.no_grad().
# run: --gpu rtx-3060-12gb
# first: evaluation-with-gradients | memory-growth | idle-memory
# fix: no_grad
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Flatten())
        self.value, self.policy = nn.Linear(64 * 9 * 9, 1), nn.Linear(64 * 9 * 9, 6)

    def forward(self, frames):
        features = self.body(frames)
        return self.policy(features), self.value(features).squeeze(1)


net = Net().cuda()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
for _ in range(4):
    frames, values = [], []
    for _ in range(64):
        frame = torch.rand(128, 4, 84, 84)
        _, value = net(frame.cuda())  # <- cause
        frames.append(frame)
        values.append(value)
    returns = torch.stack(values).flip(0).cumsum(0).flip(0).detach()
    for number in range(4):
        logits, value = net(frames[number].cuda())
        loss = (value - returns[number]).square().mean() + 0.01 * logits.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
