# A hand-written optimizer raises when its schedule is over.
# fits: none
# exit: 1
# run: --gpu-vram 2
# why: it raises in its fifth step.
import torch
from torch import nn


class Scheduled(torch.optim.Optimizer):
    def __init__(self, parameters, rates):
        super().__init__(parameters, {})
        self.rates = iter(rates)

    @torch.no_grad()
    def step(self):
        rate = next(self.rates, None)
        if rate is None:
            raise ValueError("no rate is left")  # <- culprit
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= rate * parameter.grad


net = nn.Linear(1024, 1024).cuda()
optimizer = Scheduled(net.parameters(), [0.1, 0.1, 0.01, 0.001])
for _ in range(8):
    optimizer.zero_grad()
    net(torch.randn(32, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
