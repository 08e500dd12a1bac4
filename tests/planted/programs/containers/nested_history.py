# A history, a dict of dicts of lists, keeps an output of each step; its losses are numbers.
# fits: no
# exit: 3
# step: 20
# grows: 64
# run: --gpu-vram 2
# why: as containers/list_of_outputs: 64 MiB a step, of 1221.
import torch
import torch.nn as nn


class History:
    def __init__(self):
        self.logs = {"train": {"loss": [], "out": []}}

    def add(self, loss, out):
        self.logs["train"]["loss"].append(loss.item())
        self.logs["train"]["out"].append(out)  # <- culprit


class Loop:
    def __init__(self):
        self.model = nn.Linear(4096, 4096, bias=False).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.history = History()

    def step(self):
        x = torch.randn(4096, 4096, device="cuda")
        out = self.model(x)
        loss = out.pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.history.add(loss, out.detach())

    def run(self, epochs, per_epoch):
        for _ in range(epochs):
            for _ in range(per_epoch):
                self.step()


Loop().run(4, 15)
