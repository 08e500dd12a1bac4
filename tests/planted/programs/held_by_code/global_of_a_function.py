# A helper that computes a statistic leaves what it is given in a list of the module.
# fits: no
# exit: 3
# step: 20
# grows: 64
# run: --gpu-vram 2
# why: as containers/list_of_outputs: 64 MiB a step, of 1221.
import torch
from torch import nn

SEEN = []


def spread(values):
    global SEEN
    SEEN += [values]  # <- culprit
    return values.std().item()


def main():
    model = nn.Linear(4096, 4096, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        x = torch.randn(4096, 4096, device="cuda")
        y = model(x)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(step)
        spread(y.detach())


main()
