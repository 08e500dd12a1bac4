# pytorch/pytorch#41128: the gradient of the sparse matrix of torch.sparse.mm is computed as a dense one.
# resolved: open in torch; a sparse matrix that is data requires no gradient.
# run: --gpu rtx-2080-ti
# first: does-not-fit
# fix: requires_grad
# not: micro-batch
import torch

NODES, EDGES = 110000, 860000

rows = torch.randint(0, NODES, (EDGES,))
columns = torch.randint(0, NODES, (EDGES,))
weights = torch.randn(EDGES)
graph = torch.sparse_coo_tensor(torch.stack([rows, columns]), weights, size=(NODES, NODES))
graph = graph.cuda().requires_grad_(True)  # <- cause
features = torch.randn(NODES, 200).cuda().requires_grad_(True)
total = torch.sparse.mm(graph, features).sum()  # <- cause
total.backward()
print(features.grad.norm())
