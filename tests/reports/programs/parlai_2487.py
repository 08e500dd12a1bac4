# facebookresearch/ParlAI#2487: lru_cache on a method keeps the world, its agent and model, when another is loaded.
# resolved: a value in an attribute, instead of lru_cache.
# run: --gpu rtx-3060-12gb
# first: does-not-fit | idle-memory
# fix: lru_cache | cache_clear
import functools
import gc

import torch
from torch import nn


class World:
    def __init__(self, layers):
        self.model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(layers)]).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    @functools.lru_cache(maxsize=1)  # <- cause
    def num_examples(self):
        return 6

    def train(self):
        for _ in range(self.num_examples()):
            loss = self.model(torch.randn(64, 4096, device="cuda")).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


world = World(24)
world.train()
del world
gc.collect()
torch.cuda.empty_cache()
validation = World(112)
with torch.no_grad():
    for _ in range(4):
        print(validation.model(torch.randn(64, 4096, device="cuda")).shape)
