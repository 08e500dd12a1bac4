# OpenNMT/OpenNMT-py#1852: a pattern for the checkpoint matches all of them, and all are loaded as an ensemble.
# resolved: one checkpoint.
# run: --gpu rtx-3060-12gb
# first: does-not-fit | model-state | loaded-ahead | idle-memory
# fix: one model | fewer models | one at a time | one after
# not: micro-batch activation-checkpointing
import tempfile
from pathlib import Path

import torch
from torch import nn


class Translator(nn.Module):
    def __init__(self, words=50_000, width=1024):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.body = nn.Transformer(width, 16, 6, 6, 4096, batch_first=True)
        self.out = nn.Linear(width, words)

    def forward(self, source, target):
        return self.out(self.body(self.words(source), self.words(target)))


def save_checkpoints(folder, count=12):
    model = Translator()
    for step in range(count):
        torch.save(model.state_dict(), folder / f"enzh_{step}.pt")


def load_ensemble(folder, pattern):
    models = []
    for path in sorted(folder.glob(pattern)):
        model = Translator()
        model.load_state_dict(torch.load(path, map_location="cpu"))
        models.append(model.cuda().eval())  # <- cause
    return models


@torch.no_grad()
def translate(models, source, length=8):
    target = torch.ones(len(source), 1, dtype=torch.long, device="cuda")
    for _ in range(length):
        chance = sum(model(source, target)[:, -1].softmax(-1) for model in models)
        target = torch.cat([target, chance.argmax(-1, keepdim=True)], 1)
    return target


with tempfile.TemporaryDirectory() as name:
    save_checkpoints(Path(name))
    ensemble = load_ensemble(Path(name), "enzh*.pt")  # <- cause
    for _ in range(4):
        print(translate(ensemble, torch.randint(0, 50_000, (32, 40)).cuda()).shape)
