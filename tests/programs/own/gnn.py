"""A network on a graph: messages are summed over edges with index_add, and read out of masks."""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.message, self.own = nn.Linear(2 * before, after), nn.Linear(before, after)

    def forward(self, nodes, edges):
        source, target = edges
        told = self.message(torch.cat([nodes[source], nodes[target]], 1)).relu()
        total = torch.zeros(len(nodes), told.shape[1], device=nodes.device).index_add_(0, target, told)
        count = torch.zeros(len(nodes), device=nodes.device).scatter_add_(
            0, target, torch.ones_like(target, dtype=torch.float)
        )
        return (self.own(nodes) + total / count.clamp(min=1)[:, None]).relu()


device = "cuda" if torch.cuda.is_available() else "cpu"
nodes, edges = torch.randn(2000, 128).to(device), torch.randint(0, 2000, (2, 12_000)).to(device)
labels, train = torch.randint(0, 7, (2000,)).to(device), (torch.arange(2000) % 3 == 0).to(device)
first, second, head = (layer.to(device) for layer in (Layer(128, 256), Layer(256, 256), nn.Linear(256, 7)))
weights = [weight for layer in (first, second, head) for weight in layer.parameters()]
optimizer = torch.optim.Adam(weights, lr=0.01, weight_decay=5e-4)
for epoch in range(3):
    optimizer.zero_grad()
    output = head(second(first(nodes, edges), edges))
    loss = nn.functional.cross_entropy(output[train], labels[train])
    loss.backward()
    optimizer.step()
    right = (output.argmax(1) == labels)[~train].float().mean()
    print(f"{epoch}: {loss:.3f} {right:.2%}")
