# A stream of batches without an end, of which a set keeps every one.
# fits: no
# exit: 3
# step: 20
# grows: 64
# run: --gpu-vram 2
# why: as containers/list_of_outputs, with batches in the place of outputs.
import torch
from torch import nn

seen = set()


def stream():
    while True:
        batch = torch.randn(4096, 4096, device="cuda")
        seen.add(batch)  # <- culprit
        yield batch


model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in stream():
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
