# pytorch/pytorch#46386: a hook that is a closure over its own module makes a cycle, and old modules stay for long.
# resolved: open in torch; collect garbage, or let the hook have a weak reference.
# run: --gpu rtx-3060-12gb
# first: memory-growth | does-not-fit | idle-memory
# fix: gc.collect | cycle | weak
import torch
from torch import nn


class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(4)])
        self.seen = 0

        def count(module, args, output):
            self.seen += 1

        self.register_forward_hook(count)  # <- cause

    def forward(self, x):
        return self.body(x)


for _ in range(60):
    net = Wrapper().cuda()
    with torch.no_grad():
        print(net(torch.randn(16, 4096, device="cuda")).mean().item())
