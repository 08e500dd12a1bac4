# learnables/learn2learn#393: each step of MAML's adaptation keeps its graph, so that many steps do not fit.
# resolved: first_order=True, which takes gradients without create_graph.
# run: --gpu rtx-3060-12gb
# first: memory-growth | does-not-fit
# fix: create_graph | first-order | first_order
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F


class ConvNet(nn.Module):
    def __init__(self, ways=5):
        super().__init__()
        blocks = []
        for channels in (3, 64, 64, 64):
            blocks += [nn.Conv2d(channels, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*blocks, nn.Flatten())
        self.out = nn.Linear(64 * 25, ways)

    def forward(self, x):
        return self.out(self.features(x))


def adapt(model, params, x, y, steps, lr=0.01):
    for _ in range(steps):
        loss = F.cross_entropy(functional_call(model, params, (x,)), y)
        grads = torch.autograd.grad(loss, params.values(), create_graph=True)  # <- cause
        params = {name: p - lr * g for (name, p), g in zip(params.items(), grads, strict=True)}
    return params


def main(steps=60):
    model = ConvNet().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for iteration in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            support, query = torch.randn(2, 100, 3, 84, 84, device="cuda")
            labels = torch.arange(5, device="cuda").repeat(20)
            params = adapt(model, dict(model.named_parameters()), support, labels, steps)
            loss = F.cross_entropy(functional_call(model, params, (query,)), labels)
            loss.backward()
        optimizer.step()
        print(iteration, loss.item())


main()
