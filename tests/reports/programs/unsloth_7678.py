# unslothai/unsloth#7678: masks of packed sequences are cached by their lengths, and no two batches have the same.
# resolved: at most 32 of them, the oldest goes first.
# run: --gpu rtx-3060-12gb
# first: memory-growth
# fix: limit | drop | evict | bounded
import random

import torch
from torch import nn

_MASKS = {}


def make_mask(lengths):
    if lengths not in _MASKS:
        owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()
        same = owner[:, None] == owner[None, :]
        _MASKS[lengths] = torch.zeros(same.shape, device="cuda").masked_fill_(~same, float("-inf"))  # <- cause
    return _MASKS[lengths]


class Attention(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x, mask):
        query, key, value = self.qkv(x).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


random.seed(0)
model = Attention().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(60):
    cuts = sorted(random.sample(range(1, 2048), 7))
    lengths = tuple(after - before for before, after in zip([0, *cuts], [*cuts, 2048], strict=True))
    loss = model(torch.randn(1, 2048, 256, device="cuda"), make_mask(lengths)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
