# After each step a batch is validated without no_grad, and its loss summed: the graph stays.
# fits: no
# exit: 3
# step: 12
# grows: 128
# run: --gpu-vram 2
# why: the graph of a step holds the batch and the output, 128 MiB. 1622 less weights 64, the square 64 and workspaces
#      17 leave 1477: 11 of 128.
import torch
from torch import nn


def validate(model, totals):
    batch = torch.randn(4096, 4096, device="cuda")
    totals["val"] = totals["val"] + model(batch).square().mean()  # <- culprit


def train(model, optimizer):
    batch = torch.randn(1024, 4096, device="cuda")
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    model = nn.Linear(4096, 4096, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    totals = {"train": 0.0, "val": 0.0}
    for _ in range(30):
        totals["train"] += train(model, optimizer)
        validate(model, totals)
    print(totals["train"])
