# The logits of a batch stay until those of the next are there; a number of them is printed after their last use.
# run: --gpu-vram 2
import torch
from torch import nn
from torch.nn import functional as F

model = nn.Linear(1024, 32768, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    x = torch.randn(2048, 1024, device="cuda")
    y = torch.randint(0, 32768, (2048,), device="cuda")
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(
        set_to_none=True,
    )
    print(step)  # the end of a step
logits = None
