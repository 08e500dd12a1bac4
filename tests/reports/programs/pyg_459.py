# pyg-team/pytorch_geometric#459: a graph convolution makes a message of all features for each of 9 million edges.
# resolved: a product with the sparse matrix of the graph, which makes no messages.
# run: --gpu rtx-3060-12gb
# first: does-not-fit
# fix: sparse
# not: micro-batch
import torch
from torch import nn

NODES, EDGES, WIDTH = 14049, 9075063, 200


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NODES, WIDTH))

    def forward(self, edges, norm):
        messages = norm.unsqueeze(1) * self.weight[edges[0]]  # <- cause
        return torch.zeros_like(self.weight).index_add(0, edges[1], messages)


edges = torch.randint(0, NODES, (2, EDGES)).cuda()
norm = torch.rand(EDGES).cuda()
model = Convolution().cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    loss = model(edges, norm).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
