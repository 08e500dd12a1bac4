# Three epochs of a loader with five batches, whose outputs are kept.
# fits: yes
# exit: 0
# grows: 64
# run: --gpu-vram 2
# why: fifteen outputs of 64 MiB, as for_range.
import torch
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.zeros(5 * 16, 4096)), batch_size=16)
model = torch.nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for epoch in range(3):
    for (batch,) in loader:
        out = model(batch.cuda().repeat(256, 1))
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(out.detach())  # <- culprit
