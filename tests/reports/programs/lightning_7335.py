# Lightning-AI/pytorch-lightning#7335: a search for the batch size cannot go on after it has run out of memory.
# resolved: let go of the error, whose traceback has the frames with their tensors, and collect garbage.
# run: --gpu rtx-3060-12gb
# first: out-of-memory-caught | does-not-fit | idle-memory
# fix: traceback | exception
# also: out-of-memory-caught
import gc

import torch
from torch import nn


def try_batch(model, optimizer, size):
    x = torch.randn(size, 2048, device="cuda")
    outputs = []
    for layer in model:
        x = torch.relu(layer(x))
        outputs.append(x)
    torch.stack([output.mean() for output in outputs]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


model = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(16)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
errors, size = [], 4096
while size >= 256:
    try:
        try_batch(model, optimizer, size)
    except torch.OutOfMemoryError as error:
        errors.append(error)  # <- cause
        break
    size *= 2
gc.collect()
torch.cuda.empty_cache()
for _ in range(2):
    try_batch(model, optimizer, size // 2)
