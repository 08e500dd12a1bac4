# karpathy/nanoGPT#236: a checkpoint that was loaded to the GPU stays there while the resumed model trains.
# resolved: `checkpoint = None` after its last use; others load it with map_location="cpu".
# run: --gpu rtx-3070
# first: does-not-fit | idle-memory
# fix: del checkpoint | map_location | checkpoint = None
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

WORDS, WIDTH = 50304, 1024


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.back(F.gelu(self.wide(self.norm(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(24))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens, targets):
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())


def save(path):
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": 1000}, path)


out_dir = Path(tempfile.mkdtemp())
save(out_dir / "ckpt.pt")

checkpoint = torch.load(out_dir / "ckpt.pt", map_location="cuda")  # <- cause
model = Gpt()
model.load_state_dict(checkpoint["model"])
model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
optimizer.load_state_dict(checkpoint["optimizer"])
iteration = checkpoint["iteration"]
for _ in range(3):
    tokens = torch.randint(0, WORDS, (3, 1024), device="cuda")
    loss = model(tokens, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
