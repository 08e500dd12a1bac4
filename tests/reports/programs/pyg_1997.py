# pyg-team/pytorch_geometric#1997: a model that is trained on samples of a graph is tested on the whole of it at once.
# resolved: inference layer by layer, in batches of nodes, with results on the CPU.
# run: --gpu rtx-3090
# first: does-not-fit | evaluation-batch
# fix: in batches | sparse
# also: evaluation-batch
# not: activation-checkpointing
import torch
from torch import nn

NODES, EDGES = 2_400_000, 60_000_000


class Sage(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.own, self.neighbors = nn.Linear(inside, outside), nn.Linear(inside, outside, bias=False)

    def forward(self, x, edges):
        source, target = edges
        messages = x[source]  # <- cause
        total = torch.zeros(len(x), x.shape[1], device=x.device).index_add_(0, target, messages)
        degree = torch.bincount(target, minlength=len(x)).clamp(min=1)
        return self.own(x) + self.neighbors(total / degree[:, None])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Sage(100, 256), Sage(256, 256), Sage(256, 47)])

    def forward(self, x, edges):
        for layer in self.layers:
            x = torch.relu(layer(x, edges))
        return x


def sample(features, count=20_000, edges=200_000):
    rows = torch.randint(0, NODES, (count,))
    return features[rows].cuda(), torch.randint(0, count, (2, edges)).cuda()


features, edges = torch.randn(NODES, 100), torch.randint(0, NODES, (2, EDGES))
model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(4):
    x, part = sample(features)
    loss = nn.functional.cross_entropy(model(x, part)[:1024], torch.randint(0, 47, (1024,)).cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    out = model(features.cuda(), edges.cuda()).argmax(-1)  # <- cause
    print(out.shape)
