# A forward hook stores the output of a layer in every step.
# fits: no
# exit: 3
# step: 21
# grows: 64
# run: --gpu-vram 2
# why: 1622 MiB less weights 68, batch 64, gradients of features and weights 132, logits and theirs 4 * 4, and
#      workspaces 17 leave 1325: 20 of 64.
import torch
from torch import nn

features = []


def store(module, args, output):
    features.append(output.detach())  # <- culprit


model = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 256, bias=False)).cuda()
model[0].register_forward_hook(store)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    for _ in range(8):
        x = torch.randn(4096, 4096, device="cuda")
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.zeros(4096, dtype=torch.long, device="cuda")).backward()
        optimizer.step()
