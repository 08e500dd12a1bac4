# meta-pytorch/opacus#176: a hook for gradients of samples keeps the inputs of each layer, in an evaluation too.
# resolved: model.eval() before the evaluation, where the hook keeps nothing.
# run: --gpu rtx-3060-12gb
# first: evaluation-accumulates | memory-growth
# fix: drop | eval()
import torch
from torch import nn


def keep_input(layer, args, output):
    if layer.training:
        layer.activations.append(args[0].detach())  # <- cause


model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)).cuda()
for layer in model:
    if isinstance(layer, nn.Linear):
        layer.activations = []
        layer.register_forward_hook(keep_input)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for _epoch in range(2):
    for _ in range(3):
        loss = model(torch.randn(512, 1024, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.activations.clear()
    right = 0
    with torch.no_grad():
        for _ in range(60):
            right += (model(torch.randn(2048, 1024, device="cuda")).argmax(1) == 3).sum().item()
