# meta-recsys/generative-recommenders#387: an evaluation calls a method of the model with gradients.
# resolved: the loop of the evaluation runs under torch.no_grad()
# run: --gpu-vram 9
# first: evaluation-with-gradients
# fix: no_grad
# also: fragmentation larger-batch
# not: micro-batch
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

ITEMS, LENGTH, DIM = 60_000, 200, 256


class HSTU(nn.Module):
    def __init__(self, layers=8, heads=8):
        super().__init__()
        self.items = nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.positions = nn.Embedding(LENGTH, DIM)
        layer = nn.TransformerEncoderLayer(DIM, heads, 4 * DIM, 0.2, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def encode(self, ids):
        x = self.items(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1), device=ids.device)
        return self.encoder(x, mask=mask, is_causal=True)[:, -1]


def batches(n, size):
    data = TensorDataset(torch.randint(1, ITEMS, (n, LENGTH)), torch.randint(1, ITEMS, (n,)))
    return DataLoader(data, size)


def eval_loop(model, loader):
    model.eval()
    hits = 0
    for histories, target in loader:
        user = model.encode(histories.cuda())  # <- cause
        scores = user @ model.items.weight.T
        hits += (scores.topk(10, dim=1).indices == target.cuda()[:, None]).any(1).sum().item()
    return hits


def train_loop(model, optimizer, loader):
    model.train()
    for histories, target in loader:
        user = model.encode(histories.cuda())
        negatives = torch.randint(1, ITEMS, (512,), device="cuda")
        pos = (user * model.items(target.cuda())).sum(1, keepdim=True)
        logits = torch.cat([pos, user @ model.items(negatives).T], 1)
        loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device="cuda"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


model = HSTU().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
train, test = batches(2048, 128), batches(2048, 512)
for epoch in range(2):
    print(epoch, train_loop(model, optimizer, train), eval_loop(model, test))
