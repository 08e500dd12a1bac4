# A retry inside the `except` block runs beside the tensors of the attempt that failed.
# run: --gpu-vram 2
import torch
from torch import nn

layers = nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in range(4)).cuda()


def run(rows):
    x = torch.randn(rows, 4096, device="cuda")
    outputs = [x]
    for layer in layers:
        outputs.append(layer(outputs[-1]).relu())
    return sum(output.mean() for output in outputs)


for rows in (16384, 2048):
    try:
        loss = run(rows)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        print("a quarter of", rows)
        loss = run(rows // 4)
    loss.backward()
