# RenqiChen/Genomic-Selection#2: nn.MultiheadAttention returns weights of 42,000 x 42,000, which nobody reads.
# resolved: flash attention, by scaled_dot_product_attention
# run: --gpu rtx-3090
# first: does-not-fit | attention-scores
# fix: need_weights=False
# also: attention-scores
# not: micro-batch
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = self.norm1(x)
        attended, _ = self.attn(x, x, x)  # <- cause
        x = x + attended
        return x + self.mlp(self.norm2(x))


class SNPformer(nn.Module):
    def __init__(self, snps=42_000, dim=64, heads=4, depth=2):
        super().__init__()
        self.embed = nn.Embedding(6, dim)
        self.position = nn.Parameter(torch.zeros(1, snps, dim))
        self.blocks = nn.ModuleList([Block(dim, heads) for _ in range(depth)])
        self.head = nn.Linear(dim, 1)

    def forward(self, x):
        x = self.embed(x) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1)).squeeze(1)


model = SNPformer().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(10):
    genotype, phenotype = torch.randint(0, 6, (1, 42_000), device="cuda"), torch.randn(1, device="cuda")
    loss = nn.functional.mse_loss(model(genotype), phenotype)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
