# The loss of each step is kept with its graph, for an average at the end.
# run: --gpu-vram 2
import torch
from torch import nn


class Trainer:
    def __init__(self):
        self.model = nn.Linear(4096, 4096, bias=False).cuda()
        self.helper = nn.Linear(4096, 4096, bias=False).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.history = {"loss": [], "other": []}

    def train(self, steps):
        for _ in range(steps):
            x = torch.randn(4096, 4096, device="cuda")
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.history["loss"].append(loss.item())
            self.history["other"].append(self.helper(x).square().mean())


trainer = Trainer()
trainer.train(40)
print(sum(trainer.history["other"]) / 40)
