# choderalab/pinot#23: a training keeps the state dict of every epoch, where the model is.
# resolved: keep numbers of the epochs, not their states; states go to the CPU or to files.
# run: --gpu rtx-3060-12gb
# first: memory-growth | idle-memory
# fix: .cpu()
import copy

import torch
from torch import nn


class Train:
    def __init__(self, net, epochs):
        self.net, self.epochs = net, epochs
        self.optimizer = torch.optim.Adam(net.parameters(), lr=1e-5)
        self.states = {}

    def train_once(self):
        for _ in range(2):
            loss = self.net(torch.randn(64, 2048, device="cuda")).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def train(self):
        for epoch in range(self.epochs):
            self.train_once()
            self.states[epoch] = copy.deepcopy(self.net.state_dict())  # <- cause


Train(nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).cuda(), 30).train()
