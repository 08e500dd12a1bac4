# pytorch/pytorch#5309: an embedding of 14 million rows has dense gradients, though a batch reads 4096.
# resolved: sparse=True for it.
# run: --gpu rtx-3060-12gb
# first: model-state | does-not-fit
# fix: sparse=True
# also: optimizer-step-temporaries
# not: micro-batch
import torch
from torch import nn
from torch.nn import functional as F


class MatrixFactorization(nn.Module):
    def __init__(self, num_users, num_items, dim):
        super().__init__()
        self.users = nn.Embedding(num_users, dim)  # <- cause
        self.items = nn.Embedding(num_items, dim)
        self.head = nn.Sequential(nn.Linear(2 * dim, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, user, item):
        pair = torch.cat([self.users(user), self.items(item)], dim=-1)
        return self.head(pair).squeeze(-1)


NUM_USERS, NUM_ITEMS = 14_000_000, 300_000
model = MatrixFactorization(NUM_USERS, NUM_ITEMS, 64).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for step in range(20):
    user = torch.randint(0, NUM_USERS, (4096,), device="cuda")
    item = torch.randint(0, NUM_ITEMS, (4096,), device="cuda")
    label = torch.randint(0, 2, (4096,), device="cuda").float()
    loss = F.binary_cross_entropy_with_logits(model(user, item), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
