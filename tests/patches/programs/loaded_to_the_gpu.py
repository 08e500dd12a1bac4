# A checkpoint is loaded to the GPU, where its tensors stay beside the model that has copies of them.
# run: --gpu-vram 2
import io

import torch
from torch import nn


def make():
    return nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(6)])


file = io.BytesIO()
torch.save({"model": make().state_dict(), "step": 7}, file)
file.seek(0)
state = torch.load(file, map_location="cuda")
model = make().cuda()
model.load_state_dict(state["model"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(6144, 4096, device="cuda")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(state["step"])
