# huggingface/transformers#47731: a static cache that a generation keeps on the model is there in what follows.
# resolved: generate() keeps the cache in a variable, not in an attribute of the model.
# run: --gpu rtx-3090
# first: does-not-fit | idle-memory
# fix: _cache | attribute
import torch
from torch import nn

HEADS, SIZE, LAYERS = 8, 64, 16


class Decoder(nn.Module):
    def __init__(self, width=HEADS * SIZE):
        super().__init__()
        self.embed = nn.Embedding(32000, width)
        self.layers = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(LAYERS))
        self._cache = None

    def forward(self, tokens, cache=None, at=0):
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            key, value = layer(x).unflatten(-1, (2, HEADS, SIZE)).unbind(2)
            if cache is not None:
                cache[number, 0, :, at : at + tokens.shape[1]] = key
                cache[number, 1, :, at : at + tokens.shape[1]] = value
                value = value + cache[number, 1, :, : at + 1].mean(1, keepdim=True)
            x = x + value.flatten(2)
        return x

    @torch.no_grad()
    def generate(self, tokens, count):
        shape = (LAYERS, 2, tokens.shape[0], tokens.shape[1] + count, HEADS, SIZE)
        self._cache = torch.zeros(shape, device="cuda")  # <- cause
        self(tokens, self._cache)
        for at in range(count):
            self(tokens[:, -1:], self._cache, tokens.shape[1] + at)


model = Decoder().cuda()
model.generate(torch.randint(0, 32000, (16, 8192), device="cuda"), 8)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randint(0, 32000, (16, 8192), device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
