# huggingface/transformers#26571: `del model` after training frees nothing, for the trainer has it still.
# resolved: delete the trainer as well, before the next model is made.
# run: --gpu rtx-4090
# first: does-not-fit | idle-memory
# fix: del trainer | delete the model | trainer
import gc

import torch
from torch import nn


class Trainer:
    def __init__(self, model, steps):
        self.model = model
        self.steps = steps
        self.optimizer = torch.optim.AdamW(model.parameters())

    def train(self):
        for _ in range(self.steps):
            loss = self.model(torch.randn(512, 4096, device="cuda")).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def make(layers):
    return nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(layers)]).cuda()


model = make(48)
trainer = Trainer(model, 3)  # <- cause
trainer.train()
del model
gc.collect()
torch.cuda.empty_cache()

second = make(240).eval()
with torch.no_grad():
    for _ in range(4):
        second(torch.randn(512, 4096, device="cuda"))
