# Where the forward runs out of memory, the batch is halved until it fits.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: 65,536 rows of 4096 are 1 GiB, and their output another; 16,384 are 256 MiB: batch, output and its gradient,
#      weights and gradients of 64. 32,768 are 512, three times, and do not fit.
import torch
from torch import nn

model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train_step(rows):
    model(torch.randn(rows, 4096, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


rows = 65536
done = 0
while done < 10:
    try:
        train_step(rows)
        done += 1
    except torch.cuda.OutOfMemoryError:
        rows //= 2
        print("out of memory, trying", rows)
