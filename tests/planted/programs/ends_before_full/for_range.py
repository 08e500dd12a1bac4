# Outputs are kept, of as many steps as there is room for.
# fits: yes
# exit: 0
# grows: 64
# run: --gpu-vram 2
# why: 1622 MiB hold about 20 outputs of 64 (containers/list_of_outputs); the program makes 15.
import torch
from torch import nn

model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
outputs = []
for _ in range(15):
    logits = model(torch.randn(4096, 4096, device="cuda"))
    outputs.append(logits.detach())  # <- culprit
    logits.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
