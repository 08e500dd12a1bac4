# pytorch/pytorch#25340: a Function that puts its output on ctx as an attribute is never freed.
# resolved: ctx.save_for_backward() for inputs and outputs.
# run: --gpu rtx-3060-12gb
# first: memory-growth | does-not-fit
# fix: save_for_backward
import torch
from torch import nn


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        ctx.y = x * x  # <- cause
        return ctx.y

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.x


model = nn.Sequential(nn.Linear(2048, 4096), nn.Linear(4096, 512)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(40):
    hidden = model[0](torch.randn(2048, 2048, device="cuda"))
    loss = model[1](Square.apply(hidden)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
