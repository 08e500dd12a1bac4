"""A language model with a carried hidden state, cut off from the graph before each piece."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, words=2000, size=200):
        super().__init__()
        self.encoder, self.drop = nn.Embedding(words, size), nn.Dropout(0.2)
        self.rnn, self.decoder = nn.LSTM(size, size, 2, dropout=0.2), nn.Linear(size, words)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return self.decoder(self.drop(output)), hidden


def evaluate(model, pieces):
    model.eval()
    total, hidden = 0.0, (torch.zeros(2, 20, 200).cuda(), torch.zeros(2, 20, 200).cuda())
    with torch.no_grad():
        for piece in pieces:
            output, hidden = model(piece[:-1], hidden)
            total += nn.functional.cross_entropy(output.flatten(0, 1), piece[1:].flatten()).item()
    return total


model = Model().cuda()
tokens = torch.randint(0, 2000, (36 * 5, 20)).cuda()
hidden = (torch.zeros(2, 20, 200).cuda(), torch.zeros(2, 20, 200).cuda())
rate = 20.0
for piece in tokens.split(36):
    model.train()
    model.zero_grad()
    hidden = tuple(state.detach() for state in hidden)
    output, hidden = model(piece[:-1], hidden)
    nn.functional.cross_entropy(output.flatten(0, 1), piece[1:].flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.grad, alpha=-rate)
    if evaluate(model, tokens.split(36)) > 10:
        rate /= 4
