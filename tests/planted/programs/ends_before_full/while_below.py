# A loop of ten steps by hand, which keeps a graph of each.
# fits: yes
# exit: 0
# grows: 128
# run: --gpu-vram 2
# why: graphs of 64 MiB of batch and 64 of output: nine before the last are 1152, and 64 of weights, 64 of gradients,
#      192 of the tenth.
import torch
from torch import nn


def main(max_steps=10):
    model = nn.Linear(4096, 4096, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    extra = 0
    step = 0
    while step < max_steps:
        x = torch.randn(4096, 4096, device="cuda")
        extra = extra + model(x).square().mean()  # <- culprit
        model(x[:64]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    print(step)


main()
