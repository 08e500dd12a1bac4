"""A training script for the golden files: a small model, two ways to keep memory, an evaluation."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5000, 256)
        self.layers = nn.ModuleList(Block(256) for _ in range(3))
        self.head = nn.Linear(256, 5000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main() -> None:
    model = Tagger().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(4):
        ids = torch.randint(0, 5000, (8, 64), device="cuda")
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss)
    model.eval()
    for _ in range(2):
        model(torch.randint(0, 5000, (8, 64), device="cuda"))


if __name__ == "__main__":
    main()
