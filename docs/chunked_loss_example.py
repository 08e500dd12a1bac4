"""Prints a table of docs/fixes.md: what the loss of a head takes, whole and in chunks, memprof's and torch's own.

Beside the head's input, its weight and the labels, on a virtual GPU, at the most in a forward and backward.

python docs/chunked_loss_example.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy, linear, linear_cross_entropy

import memprof
from memprof.fixes.head_loss import ChunkRows, row_losses
from memprof.units import MIB

WIDTH, VOCABULARY, CHUNK = 2560, 151_936, 1024
TOKENS = (16_384, 65_536)

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of hidden states, the head's weight and labels."""


def in_chunks(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of the fix `chunked-loss`."""
    return row_losses(hidden, weight, None, labels, rows=ChunkRows(CHUNK, 0)).mean()


def torch_policy(policy: str) -> Loss:
    """torch's own chunked loss."""
    options = torch.nn.LinearCrossEntropyOptions(False, CHUNK, None, policy, torch.float32)
    return lambda hidden, weight, labels: linear_cross_entropy(hidden, weight, labels, options=options)


def peak_bytes(loss: Loss, tokens: int) -> int:
    """Of a forward and backward, beside what it is given."""
    with memprof.virtual_gpu("h100-80gb") as gpu:
        hidden, weight = (
            torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            for rows in (tokens, VOCABULARY)
        )
        labels = torch.zeros(tokens, dtype=torch.int64, device="cuda")
        before = gpu.allocated_bytes
        loss(hidden, weight, labels).backward()
    return gpu.report().peak.allocated_bytes - before


def main() -> None:
    """Print the table."""
    losses: dict[str, Loss] = {
        "full logits": lambda hidden, weight, labels: cross_entropy(linear(hidden, weight), labels),
        "chunked-loss": in_chunks,
        **{f"torch, {policy}": torch_policy(policy) for policy in ("balanced", "accurate", "compact")},
    }
    print(f"{'tokens':<20}" + "".join(f"{tokens:>13,}" for tokens in TOKENS))
    for name, loss in losses.items():
        print(f"{name:<20}" + "".join(f"{peak_bytes(loss, tokens) / MIB:>9,.0f} MiB" for tokens in TOKENS))


if __name__ == "__main__":
    main()
