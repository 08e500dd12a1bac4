# A Function has its output as an attribute of ctx: a cycle, which no collector sees through the graph.
# run: --gpu-vram 2
import gc

import torch
from torch import nn

gc.disable()


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save = x.sigmoid()
        ctx.result = x * ctx.save
        return ctx.result

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (ctx.save + ctx.result * (1 - ctx.save))


model = nn.Linear(2048, 2048, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(60):
    x = torch.randn(2048, 2048, device="cuda")
    Swish.apply(model(x)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
