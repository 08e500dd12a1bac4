# alexhernandezgarcia/gflownet#133: running averages of the losses are tensors, and keep the graph of every step.
# resolved: averages of loss.item()
# run: --gpu rtx-3060-12gb
# first: memory-growth
# fix: .item() | .detach()
import torch
from torch import nn


class Average:
    def __init__(self, alpha=0.9):
        self.alpha, self.value = alpha, None

    def update(self, loss):
        self.value = loss if self.value is None else self.alpha * self.value + (1 - self.alpha) * loss  # <- cause


class Agent:
    def __init__(self):
        self.forward_policy = nn.Sequential(
            nn.Linear(64, 1024), nn.LeakyReLU(), nn.Linear(1024, 1024), nn.LeakyReLU(), nn.Linear(1024, 33)
        ).cuda()
        self.log_z = nn.Parameter(torch.ones(16, device="cuda"))
        self.optimizer = torch.optim.Adam([*self.forward_policy.parameters(), self.log_z], lr=1e-3)
        self.loss_term, self.loss_flow = Average(), Average()

    def compute_loss(self, states, term):
        logits = self.forward_policy(states)
        flow = logits.logsumexp(-1)
        loss_flow = (flow - self.log_z.sum())[~term].pow(2).mean()
        loss_term = flow[term].pow(2).mean()
        return loss_term + loss_flow, loss_term, loss_flow

    def train_step(self):
        states = torch.randn(4096, 64, device="cuda")
        term = torch.arange(4096, device="cuda") % 8 == 0
        loss, loss_term, loss_flow = self.compute_loss(states, term)
        self.loss_term.update(loss_term)
        self.loss_flow.update(loss_flow)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


agent = Agent()
for step in range(400):
    agent.train_step()
