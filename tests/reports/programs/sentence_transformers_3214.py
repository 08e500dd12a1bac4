# huggingface/sentence-transformers#3214: each trial of a search makes a model, and the models of earlier ones stay.
# resolved: keep scores and parameters of a trial, not its trainer; delete the model before the next is made.
# run: --gpu rtx-4090
# first: memory-growth | does-not-fit | idle-memory
# fix: del | keep the score | drop
import torch
from torch import nn


class Trainer:
    def __init__(self, make_model, rate):
        self.model = make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)

    def train(self, steps):
        for _ in range(steps):
            loss = self.model(torch.randn(256, 2048, device="cuda")).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item()


def make_model():
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(24)]).cuda()


trials = []
for rate in (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4):
    trainer = Trainer(make_model, rate)
    score = trainer.train(3)
    trials.append((score, rate, trainer))  # <- cause
print(min(trials, key=lambda trial: trial[0])[:2])
