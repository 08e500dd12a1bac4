# A list that is cut to its last ten: it grows for ten steps.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: ten of 64 MiB and one more before it is cut, 704, beside 5 * 64.
import torch
from torch import nn

recent = []
model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(50):
    y = model(torch.randn(4096, 4096, device="cuda"))
    recent.append(y.detach())
    recent = recent[-10:]
    y.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
