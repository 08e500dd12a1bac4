# facebookresearch/higher#6: each step of an adaptation keeps a graph of its gradients, for no outer loss.
# resolved: track_higher_grads=False, which takes gradients without create_graph.
# run: --gpu rtx-3060-12gb
# first: memory-growth
# fix: create_graph=False
# also: fragmentation
# not: micro-batch
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F


class TextClassifier(nn.Module):
    def __init__(self, words=30_000, dim=512, layers=6, classes=4):
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        layer = nn.TransformerEncoderLayer(dim, 8, 4 * dim, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(dim, classes)

    def forward(self, ids):
        return self.head(self.encoder(self.embed(ids)).mean(1))


def adapt(model, params, ids, labels, lr):
    loss = F.cross_entropy(functional_call(model, params, (ids,)), labels)
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)  # <- cause
    return {name: p - lr * g for (name, p), g in zip(params.items(), grads, strict=True)}, loss


model = TextClassifier().cuda()
for task in range(3):
    fast = dict(model.named_parameters())
    for step in range(100):
        ids, labels = torch.randint(0, 30_000, (16, 64)).cuda(), torch.randint(0, 4, (16,)).cuda()
        fast, loss = adapt(model, fast, ids, labels, lr=1e-2)
        print(task, step, loss.item())
    correct = 0
    with torch.no_grad():
        for _ in range(20):
            ids, labels = torch.randint(0, 30_000, (64, 64)).cuda(), torch.randint(0, 4, (64,)).cuda()
            correct += (functional_call(model, fast, (ids,)).argmax(-1) == labels).sum().item()
    print("accuracy after adaptation", correct / 1280)
