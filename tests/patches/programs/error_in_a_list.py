# Batches that are too large leave their errors in a list, and these the tensors of the attempt.
# run: --gpu-vram 2
import torch
from torch import nn

layers = nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in range(4)).cuda()


def try_rows(rows):
    x = torch.randn(rows, 4096, device="cuda")
    outputs = [x]
    for layer in layers:
        outputs.append(layer(outputs[-1]).relu())
    sum(output.mean() for output in outputs).backward()


failures = []
for rows in (16384, 4096):
    try:
        try_rows(rows)
    except torch.OutOfMemoryError as error:
        failures.append((rows, error))
print(len(failures))
