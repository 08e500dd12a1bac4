"""Batches built before training, and batches that stream: the same batches, all in host memory at once or one.

As a script, one pass over a corpus in this process and what its memory came to at the most:

    python batches.py built 8388608
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path

import torch

BATCH, TOKENS = 32, 128
Batch = tuple[torch.Tensor, torch.Tensor]


def streamed(ids: Iterable[int], batch_size: int = BATCH, length: int = TOKENS) -> Iterator[Batch]:
    """Inputs and targets, int64 [batch_size, length] each; targets are inputs one token on.

    Nothing is held but the batch at hand. What does not fill a batch is left out.
    """
    stream = iter(ids)
    last = list(islice(stream, 1))
    while len(block := list(islice(stream, batch_size * length))) == batch_size * length:
        tokens = torch.tensor(last + block)
        yield tokens[:-1].view(batch_size, length), tokens[1:].view(batch_size, length)
        last = block[-1:]


def built(ids: Iterable[int], batch_size: int = BATCH, length: int = TOKENS) -> list[Batch]:
    """As the report's code had it: all batches of the corpus, before the first is used."""
    return list(streamed(ids, batch_size, length))


KINDS = {"built": built, "streamed": streamed}


def one_pass(kind: str, tokens: int, device: str, batch_size: int = BATCH, length: int = TOKENS) -> int:
    """Move each batch of a corpus of `tokens` tokens to `device` and look its words up; returns how many batches."""
    table = torch.ones(10_000, 16, device=device)
    seen = 0
    with torch.no_grad():
        for inputs, targets in KINDS[kind](islice(cycle(range(10_000)), tokens + 1), batch_size, length):
            torch.nn.functional.embedding(inputs.to(device), table)
            torch.nn.functional.embedding(targets.to(device), table)
            seen += 1
    return seen


def simulated_bytes(kind: str, tokens: int) -> int:
    """The peak of host memory that tensors take in one pass, by memprof's account."""
    import memprof

    with memprof.virtual_gpu("a100-80gb") as gpu:
        one_pass(kind, tokens, "cuda")
    return gpu.report().host_peak_bytes


def measured_bytes(kind: str, tokens: int) -> int:
    """The peak of resident memory of a process of its own that makes one pass on the CPU, in bytes."""
    done = subprocess.run(
        [sys.executable, __file__, kind, str(tokens)], stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    return int(done.stdout)


def peak_resident_bytes() -> int:
    """Of this process, since it began to run this program.

    `ru_maxrss` would not do: it keeps the peak of the process that started this one, across the exec.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    one_pass(sys.argv[1], int(sys.argv[2]), "cpu")
    print(peak_resident_bytes())
