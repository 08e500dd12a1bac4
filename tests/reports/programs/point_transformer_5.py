# lucidrains/point-transformer-pytorch#5: each of 2048 points attends to all others, by a vector for each pair.
# resolved: num_neighbors: each attends to its nearest alone.
# run: --gpu rtx-2080-ti
# first: does-not-fit
# fix: nearest
# not: micro-batch
import torch
from torch import nn


class PointTransformerLayer(nn.Module):
    def __init__(self, dim, pos_hidden=64, mult=4):
        super().__init__()
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.pos_mlp = nn.Sequential(nn.Linear(3, pos_hidden), nn.ReLU(), nn.Linear(pos_hidden, dim))
        self.attn_mlp = nn.Sequential(nn.Linear(dim, dim * mult), nn.ReLU(), nn.Linear(dim * mult, dim))

    def forward(self, x, pos):
        n = x.shape[1]
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        rel_pos = pos[:, :, None] - pos[:, None]  # <- cause
        rel_pos_emb = self.pos_mlp(rel_pos)
        qk_rel = q[:, :, None] - k[:, None]
        sim = self.attn_mlp(qk_rel + rel_pos_emb)
        v = v[:, None].expand(-1, n, -1, -1) + rel_pos_emb
        attn = sim.softmax(dim=-2)
        return torch.einsum("bijd,bijd->bid", attn, v)


class Classifier(nn.Module):
    def __init__(self, dim=64, classes=40):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(3, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.attention = PointTransformerLayer(dim)
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, classes))

    def forward(self, pos):
        x = self.embed(pos)
        x = x + self.attention(x, pos)
        return self.head(x.max(dim=1).values)


model = Classifier().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(10):
    points, labels = torch.rand(16, 2048, 3).cuda(), torch.randint(0, 40, (16,)).cuda()
    loss = nn.functional.cross_entropy(model(points), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
