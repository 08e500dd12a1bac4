"""Compiled code recorded on a card: every allocation and free of it, in order, with its bytes and its block.

Source: the memory snapshots of github.com/sungdk0822/CS336-assignment2-systems at 849f31e (memory_snapshots/attn, files
ending in _forwardpassonly_compile.pickle; torch 2.6 on an A100): plain attention without a mask, compiled as a
function, 8 sequences, inputs that need gradients, widths 16 to 128 and lengths 256 to 16,384 one after the other in one
process. In each of the 20 files each of 100 recorded calls takes and gives back the same.
"""

from __future__ import annotations

import pytest
import torch

from memprof.catalog import find_gpu
from memprof.trace.events import EventKind, Trace
from memprof.virtual import VirtualGpu

pytest.importorskip("triton", reason="Inductor writes no kernels for a card without it")

SEQUENCES = 8
FREED = [0, 1, 3, 2, 4, 5]
"""Which of the six is given back first."""


def recorded(width: int, length: int) -> list[tuple[str, int]]:
    """The scores, the rows' maxima, their sums and the maxima's positions, the probabilities, the result."""
    rows, scores = SEQUENCES * length, SEQUENCES * length * length
    taken = [4 * scores, 4 * rows, 4 * rows, 8 * rows, 4 * scores, 4 * rows * width]
    return [*(("take", size) for size in taken), *(("give", block) for block in FREED)]


def softmax(scores: torch.Tensor) -> torch.Tensor:
    scores -= scores.max(dim=-1, keepdim=True).values
    powers = torch.exp(scores)
    return powers / powers.sum(dim=-1, keepdim=True)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    return softmax(scores) @ value


def seen(trace: Trace, since: int) -> list[tuple[str, int]]:
    blocks: dict[int, int] = {}
    found = []
    for event in trace.events[since:]:
        if event.kind is EventKind.ALLOC:
            blocks[event.ref] = len(blocks)
            found.append(("take", trace.storages[event.ref].num_bytes))
        elif event.kind is EventKind.FREE:
            found.append(("give", blocks[event.ref]))
    return found


LENGTHS = (256, 1024, 4096, 8192, 16384)


@pytest.mark.parametrize(
    ("widths", "lengths"),
    [((16,), (1024, 4096)), pytest.param((16, 32, 64, 128), LENGTHS, marks=pytest.mark.nightly)],
)
def test_attention_compiled_anew_for_widths_and_lengths(widths: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    with VirtualGpu(find_gpu("a100-80gb")) as gpu:
        compiled = torch.compile(attention)
        for width in widths:
            for length in lengths:
                inputs = [torch.randn(SEQUENCES, length, width, device="cuda", requires_grad=True) for _ in range(3)]
                compiled(*inputs)  # cuBLAS takes its workspace, and inputs of before are gone
                since = len(gpu.trace.events)
                compiled(*inputs)
                assert seen(gpu.trace, since) == recorded(width, length), (width, length)
    assert not any("runs eagerly" in line for line in gpu.trace.assumptions)
