# After each epoch of four steps a batch of eight times the rows is evaluated without gradients, and fits.
# fits: yes
# exit: 0
# run: --gpu-vram 2
# why: 16,384 rows are 256 MiB: the batch, and two results of layers at a time, are 768; weights and gradients 256.
import torch
from torch import nn


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(self, epochs):
        for epoch in range(epochs):
            self.model.train()
            for _ in range(4):
                loss = self.model(torch.randn(2048, 4096, device="cuda")).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            print(epoch, self.validate())

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        return self.model(torch.randn(16384, 4096, device="cuda")).mean().item()


Trainer(nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 4096, bias=False)).cuda()).fit(3)
