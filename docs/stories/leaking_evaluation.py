"""A training script with an evaluation after each epoch, which keeps the logits of every batch on the GPU."""

import argparse

import torch
from torch import nn
from torch.nn import functional

WORDS = 50_000


class Writer(nn.Module):
    """An embedding, a recurrent layer, and logits for the next word."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for the word after each."""
        return self.head(self.encoder(self.embedding(tokens))[0])


def batches(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Words, and the words after them."""
    texts = [torch.randint(WORDS, (32, 257)) for _ in range(number)]
    return [(text[:, :-1], text[:, 1:]) for text in texts]


def evaluate(model: Writer, *, mended: bool) -> float:
    """The share of words that are right."""
    model.eval()
    predictions, words = [], []
    with torch.no_grad():
        for tokens, wanted in batches(12):
            logits = model(tokens.cuda())
            predictions.append(logits.argmax(-1).cpu() if mended else logits)
            words.append(wanted)
    found = torch.cat(predictions) if mended else torch.cat(predictions).argmax(-1).cpu()
    return (found == torch.cat(words)).float().mean().item()


def main() -> None:
    """Train, and evaluate after each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    options = parser.parse_args()
    model = Writer().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(2):
        model.train()
        for tokens, wanted in batches(3):
            loss = functional.cross_entropy(model(tokens.cuda()).flatten(0, 1), wanted.cuda().flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: {evaluate(model, mended=options.mended):.0%}")


if __name__ == "__main__":
    main()
