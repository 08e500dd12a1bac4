# ByteDance-Seed/Depth-Anything-3#268: a mask of views is repeated for each head before the attention.
# resolved: attn_mask[:, None] broadcasts over the heads.
# run: --gpu rtx-3070
# first: does-not-fit | attention-scores
# fix: broadcast | expand
# also: fragmentation
# not: micro-batch
import torch
from torch import nn
from torch.nn import functional as F

HEADS, WIDTH, TOKENS = 12, 768, 973


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if mask is not None:
            mask = mask[:, None].repeat(1, HEADS, 1, 1)  # <- cause
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Backbone(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))
        self.blocks = nn.ModuleList(Attention() for _ in range(depth))

    def forward(self, x, mask):
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x), mask)
        return x


def make_mask(views):
    view = torch.arange(views, device="cuda").repeat_interleave(TOKENS)
    near = (view[:, None] - view[None]).abs() <= 3
    return torch.zeros(near.shape, device="cuda").masked_fill_(~near, float("-inf"))[None]


model = Backbone().cuda().eval()
with torch.inference_mode():
    for views in (4, 14):
        depth = model(torch.randn(1, views * TOKENS, WIDTH, device="cuda"), make_mask(views))
        print(views, depth.shape)
