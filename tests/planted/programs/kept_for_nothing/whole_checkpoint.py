# One checkpoint is around all eight layers: their activations are all there at once in the backward.
# fits: yes
# exit: 0
# run: --gpu-vram 6
# why: a layer keeps two tensors of 65,536 x 1,024 numbers, 512 MiB; with a checkpoint for each, one layer's are there.
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(torch.sigmoid(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.layers = nn.Linear(16, 256), nn.Sequential(*(Layer() for _ in range(8)))

    def forward(self, x):
        return checkpoint(self.layers, self.stem(x), use_reentrant=False)  # <- culprit


net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    loss = net(torch.randn(65536, 16, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
