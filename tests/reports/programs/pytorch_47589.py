# pytorch/pytorch#47589: an object with an optimizer, and a schedule that is a lambda over it, are a cycle.
# resolved: collect garbage after each run, or give the lambda what it needs without self.
# run: --gpu rtx-3060-12gb
# first: memory-growth | does-not-fit | idle-memory
# fix: gc.collect | cycle
import torch
from torch import nn

shared = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(4)]).cuda()


class Session:
    def __init__(self):
        self.rate = 1.0
        self.optimizer = torch.optim.Adam(shared.parameters())
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: self.rate)  # <- cause

    def run(self):
        loss = shared(torch.randn(32, 4096, device="cuda")).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()


for _ in range(60):
    Session().run()
