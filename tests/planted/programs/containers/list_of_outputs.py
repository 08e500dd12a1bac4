# A list keeps the logits of every batch for an accuracy at the end.
# fits: no
# exit: 3
# step: 20
# grows: 64
# run: --gpu-vram 2
# why: 1622 MiB less weights, batch and the four tensors of the square's backward, 6 * 64, and workspaces of 17 leave
#      1221: 19 outputs of 64, that of the step included.
import torch
from torch import nn

model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
outputs = []
for _ in range(60):
    batch = torch.randn(4096, 4096, device="cuda")
    logits = model(batch)
    outputs.append(logits.detach())  # <- culprit
    loss = logits.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(len(outputs))
