# lucidrains/ema-pytorch#35: each checkpoint makes a copy of every averaged model on the GPU.
# resolved: copy the values of the state dict to the CPU instead.
# run: --gpu rtx-3060-12gb
# first: does-not-fit | idle-memory
# fix: .cpu() | to the CPU | host memory
# also: unattributed
# not: micro-batch activation-checkpointing
import copy
import io

import torch
from torch import nn


class PostHocEma:
    def __init__(self, model, count):
        self.models = [copy.deepcopy(model).requires_grad_(False) for _ in range(count)]

    @torch.no_grad()
    def update(self, model, decay=0.99):
        for average in self.models:
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 1 - decay)

    def checkpoint(self):
        for average in self.models:
            package = copy.deepcopy(average).half().state_dict()  # <- cause
            torch.save(package, io.BytesIO())


model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(24)]).cuda()
ema = PostHocEma(model, 2)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    loss = model(torch.randn(64, 4096, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    ema.update(model)
    if step % 2:
        ema.checkpoint()
    optimizer.zero_grad()
