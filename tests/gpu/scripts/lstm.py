"""An LSTM language model in float32, on cuDNN."""

import torch
from recording import record_steps
from torch import nn


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10_000, 256)
        self.lstm = nn.LSTM(256, 512, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(512, 10_000)

    def forward(self, tokens):
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(states)


model = LanguageModel().to("cuda")
optimizer = torch.optim.Adam(model.parameters())


def step():
    tokens = torch.randint(0, 10_000, (16, 128), device="cuda")
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


record_steps("lstm", step)
