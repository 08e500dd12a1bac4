"""A training script with the mistakes that cost memory: each can be left out, to see what it costs."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--heads", type=int, default=2)
parser.add_argument("--vocab", type=int, default=128)
parser.add_argument("--length", type=int, default=16)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--attn", default="sdpa", choices=("sdpa", "eager"))
parser.add_argument("--keep", default="losses,logits,rope", help="the mistakes to make")
args = parser.parse_args()
mistakes = set(args.keep.split(","))
head_size = args.hidden // args.heads


def rotations():
    frequencies = 1.0 / 10000 ** (torch.arange(0, head_size, 2).float() / head_size)
    angles = torch.outer(torch.arange(args.length).float(), frequencies)
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


class Rope(nn.Module):
    def __init__(self):
        super().__init__()
        cos, sin = rotations()
        if "rope" in mistakes:
            self.cos, self.sin = cos, sin  # no buffers: they stay where they are when the model moves
        else:
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)

    def forward(self, x):
        first, second = x.chunk(2, dim=-1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(args.hidden), nn.RMSNorm(args.hidden)
        self.qkv = nn.Linear(args.hidden, 3 * args.hidden)
        self.out = nn.Linear(args.hidden, args.hidden)
        self.up, self.down = nn.Linear(args.hidden, 4 * args.hidden), nn.Linear(4 * args.hidden, args.hidden)
        self.rope = Rope()

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, args.heads, head_size).permute(2, 0, 3, 1, 4)
        q, k = self.rope(q), self.rope(k)
        if args.attn == "sdpa":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / head_size**0.5
            hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            mixed = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.hidden)
        self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
        self.head = nn.Linear(args.hidden, args.vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(0)
model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses, evaluated = [], []
for _ in range(args.steps):
    ids = torch.randint(args.vocab, (args.batch, args.length + 1)).cuda()
    try:
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
    except torch.OutOfMemoryError as error:
        print("out of memory:", error)
        raise SystemExit(3) from None
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss if "losses" in mistakes else loss.item())  # keeps the graph
    model.eval()
    with torch.no_grad():
        logits = model(ids[:, :-1])
    evaluated.append(logits if "logits" in mistakes else logits.argmax(-1).cpu())  # keeps [batch, length, vocabulary]
    model.train()
print(f"mean loss: {sum(losses) / len(losses):.4f}")
