# RUCAIBox/RecBole#1887: eval_batch_size of 4096000 scores all items for 60,000 users at once.
# resolved: a smaller eval_batch_size.
# run: --gpu rtx-3090
# first: does-not-fit | evaluation-batch
# fix: in batches | in parts
# also: fragmentation evaluation-batch
# not: activation-checkpointing micro-batch
import torch
from torch import nn
from torch.nn import functional as F

USERS, ITEMS, LENGTH = 120_000, 90_000, 50


class SasRec(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.items = nn.Embedding(ITEMS, width, padding_idx=0)
        self.positions = nn.Embedding(LENGTH, width)
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 2, 256, batch_first=True), 2)

    def forward(self, history):
        x = self.items(history) + self.positions.weight
        return self.body(x)[:, -1]

    def full_sort_predict(self, history):
        return self(history) @ self.items.weight.T  # <- cause


model = SasRec().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(5):
    history = torch.randint(1, ITEMS, (1024, LENGTH)).cuda()
    good, bad = torch.randint(1, ITEMS, (2, 1024)).cuda()
    seen = model(history)
    loss = -F.logsigmoid((seen * (model.items(good) - model.items(bad))).sum(-1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

model.eval()
hits = []
with torch.no_grad():
    for users in torch.arange(USERS).split(60_000):  # <- cause
        histories = torch.randint(1, ITEMS, (len(users), LENGTH)).cuda()  # <- cause
        scores = model.full_sort_predict(histories)
        scores[:, 0] = float("-inf")
        hits.append(scores.topk(10)[1].cpu())
print(torch.cat(hits).shape)
