# pyg-team/pytorch_geometric#5101: the graph of 50,000 nodes is made a dense matrix.
# resolved: degrees and products of the edges; no matrix of that size.
# run: --gpu rtx-4090
# first: does-not-fit
# fix: sparse matrix
# also: fragmentation
# not: micro-batch
import torch
from torch import nn
from torch.nn import functional as F


def to_dense_adj(edge_index, num_nodes):
    adj = torch.zeros(num_nodes, num_nodes, device=edge_index.device)  # <- cause
    adj[edge_index[0], edge_index[1]] = 1.0
    return adj


def normalize(adj):
    adj = adj + torch.eye(adj.shape[0], device=adj.device)
    degree = adj.sum(dim=1).pow(-0.5)
    return degree[:, None] * adj * degree[None, :]


class GCN(nn.Module):
    def __init__(self, num_features, hidden, classes):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(num_features, hidden), nn.Linear(hidden, classes)

    def forward(self, x, adj):
        x = F.relu(adj @ self.lin1(x))
        return adj @ self.lin2(x)


num_nodes = 50_000
edge_index = torch.randint(0, num_nodes, (2, 600_000), device="cuda")
x = torch.randn(num_nodes, 128, device="cuda")
y = torch.randint(0, 40, (num_nodes,), device="cuda")
model = GCN(128, 256, 40).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
adj = normalize(to_dense_adj(edge_index, num_nodes))
for epoch in range(5):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x, adj), y)
    loss.backward()
    optimizer.step()
