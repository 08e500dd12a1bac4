# Layers are trained in turn, one for eight steps, and each has its state made when it is trained first.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: six layers of 64 MiB, at the end two moments of 64 for each: 1152, one gradient of 64, temporaries of 128, and
#      activations of 1 a layer.
import torch
from torch import nn

layers = nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in range(6)).cuda()
optimizer = torch.optim.Adam(layers.parameters(), lr=1e-4)
for step in range(72):
    for index, layer in enumerate(layers):
        layer.requires_grad_(index == step // 8 % 6)
    x = torch.randn(64, 4096, device="cuda")
    for layer in layers:
        x = layer(x).tanh()
    x.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
