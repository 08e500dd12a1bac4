# foundation-model-stack/fms-fsdp#152: the logits of the step before are alive through the next forward.
# resolved: `del output` as soon as the loss is there.
# run: --gpu rtx-4090
# first: does-not-fit | idle-memory
# fix: del output
# also: fragmentation logits-explosion
import torch
from torch import nn
from torch.nn import functional as F

WORDS, WIDTH = 128256, 1024


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2816, bias=False), nn.Linear(2816, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(20))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def train(model, steps):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        tokens = torch.randint(0, WORDS, (4, 4096), device="cuda")
        output = model(tokens)  # <- cause
        loss = F.cross_entropy(output.flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


train(Llama().to("cuda", torch.bfloat16), 4)
