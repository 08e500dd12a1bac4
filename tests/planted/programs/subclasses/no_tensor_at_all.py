# A class that is no tensor, and answers for torch's functions itself.
# fits: no
# exit: 3
# step: 1
# run: --gpu-vram 2
# why: masked outputs of 1 GiB each: batch and output do not fit 1622 MiB.
import torch
from torch import nn


class Masked:
    def __init__(self, values, mask):
        self.values, self.mask = values, mask

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        mask = next(value.mask for value in args if isinstance(value, Masked))
        plain = [value.values if isinstance(value, Masked) else value for value in args]
        return cls(func(*plain, **(kwargs or {})), mask)


model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    batch = Masked(torch.randn(65536, 4096, device="cuda"), torch.ones(65536, 1, device="cuda"))
    out = model(batch)
    (out.values * out.mask).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
