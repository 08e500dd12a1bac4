"""Embeddings with sparse gradients, and an optimizer for them beside the one of the rest."""

import torch
from torch import nn

words = nn.EmbeddingBag(50_000, 64, sparse=True, mode="mean").cuda()
head = nn.Linear(64, 4).cuda()
of_words, of_head = torch.optim.SparseAdam(list(words.parameters())), torch.optim.Adam(head.parameters())
for _ in range(3):
    tokens, starts = torch.randint(0, 50_000, (640,)).cuda(), torch.arange(0, 640, 10).cuda()
    loss = nn.functional.cross_entropy(head(words(tokens, starts)), torch.randint(0, 4, (64,)).cuda())
    of_words.zero_grad()
    of_head.zero_grad()
    loss.backward()
    of_words.step()
    of_head.step()
