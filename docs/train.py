"""Trains a small language model on one GPU. On a card with 24 GB it stops after some steps: which line is it?"""

import torch
from torch import nn

WORDS, WIDTH, BATCH, LENGTH = 32_000, 1024, 16, 512

layer = nn.TransformerEncoderLayer(WIDTH, nhead=16, dim_feedforward=4096, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.TransformerEncoder(layer, 6), nn.Linear(WIDTH, WORDS)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
predictions = []

for _ in range(1000):
    tokens = torch.randint(WORDS, (BATCH, LENGTH + 1), device="cuda")
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    predictions.append(logits)

predicted = torch.cat(predictions).argmax(-1)
print(f"{predicted.unique().numel()} of {WORDS} words were predicted")
