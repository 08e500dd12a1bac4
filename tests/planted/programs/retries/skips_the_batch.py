# One batch of many is too long: it is caught and skipped, and the rest fits.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: 65,536 rows are 1 GiB, and the output another; all others have 1024.
import torch
from torch import nn

model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
skipped = 0
for step in range(12):
    try:
        x = torch.randn(65536 if step == 1 else 1024, 4096, device="cuda")
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
    except torch.OutOfMemoryError:
        x = loss = None
        torch.cuda.empty_cache()
        skipped += 1
    finally:
        optimizer.zero_grad()
print(skipped)
