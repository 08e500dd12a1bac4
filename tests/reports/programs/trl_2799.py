# huggingface/trl#2799: log-probabilities of all words are made for one of them, of each token.
# resolved: gather the logits first, and take away their logsumexp.
# run: --gpu rtx-4090
# first: logits-explosion | does-not-fit
# fix: logsumexp
# also: fragmentation
import torch
from torch import nn

WORDS, WIDTH = 151936, 896


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.lm_head(x)


def log_chances(logits, tokens):
    every = logits.log_softmax(-1)  # <- cause
    return every.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


model = Policy().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
for _ in range(3):
    tokens = torch.randint(0, WORDS, (8, 1024), device="cuda")
    chances = log_chances(model(tokens), tokens)
    loss = -(chances * torch.randn(8, 1, device="cuda")).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
