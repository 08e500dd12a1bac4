"""A training script whose texts have lengths as texts do: most are short, a few are very long."""

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

WORDS = 50_000
TEXTS = 12_800


class Writer(nn.Module):
    """An embedding, an encoder of two layers, and logits for the next word."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for the word after each."""
        return self.head(self.encoder(self.embedding(tokens)))


def texts(longest: int) -> list[torch.Tensor]:
    """Of 64 to 511 words, but for one, which has 2,500."""
    lengths = [2_500 if number == 9_999 else 64 + number * 37 % 448 for number in range(TEXTS)]
    return [torch.zeros(min(length, longest), dtype=torch.long) for length in lengths]


def main() -> None:
    """Train for an epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--longest", type=int, default=10_000, help="longer texts are cut")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Writer().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(
        texts(options.longest), 16, shuffle=True, collate_fn=lambda some: pad_sequence(some, batch_first=True)
    )
    for step, tokens in enumerate(loader):
        words = tokens.cuda()
        logits = model(words[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
