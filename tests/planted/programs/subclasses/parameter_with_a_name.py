# A parameter class of its own, with an attribute, as libraries for quantization have it.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: two layers of 64 MiB with gradients and momentum 384, activations of 16 each.
import torch
from torch import nn


class NamedParameter(nn.Parameter):
    def __new__(cls, data, label):
        made = super().__new__(cls, data)
        made.label = label
        return made


class Layer(nn.Module):
    def __init__(self, label):
        super().__init__()
        self.weight = NamedParameter(torch.randn(4096, 4096, device="cuda"), label)

    def forward(self, x):
        return x @ self.weight.T


net = nn.Sequential(Layer("first"), Layer("second"))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for _ in range(8):
    net(torch.randn(1024, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print([parameter.label for parameter in net.parameters()])
