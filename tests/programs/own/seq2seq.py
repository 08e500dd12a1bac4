"""Translation with attention: teacher forcing on some batches, the decoder's own words on the others."""

import torch
from torch import nn


class Seq2Seq(nn.Module):
    def __init__(self, words=800, size=256):
        super().__init__()
        self.words = words
        self.embed_in, self.embed_out = nn.Embedding(words, size), nn.Embedding(words, size)
        self.encoder = nn.GRU(size, size, batch_first=True)
        self.decoder = nn.GRUCell(2 * size, size)
        self.head = nn.Linear(size, words)

    def forward(self, source, wanted, forced):
        memory, state = self.encoder(self.embed_in(source))
        state, token, outputs = state[0], wanted[:, 0], []
        for position in range(1, wanted.shape[1]):
            weights = torch.bmm(memory, state[:, :, None]).softmax(1)
            context = (weights * memory).sum(1)
            state = self.decoder(torch.cat([self.embed_out(token), context], 1), state)
            outputs.append(self.head(state))
            token = wanted[:, position] if forced else outputs[-1].argmax(1)
        return torch.stack(outputs, 1)


model = Seq2Seq().cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(3):
    source, wanted = torch.randint(0, 800, (16, 20)).cuda(), torch.randint(0, 800, (16, 15)).cuda()
    logits = model(source, wanted, forced=step % 2 == 0)
    loss = nn.functional.cross_entropy(logits.reshape(-1, 800), wanted[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
