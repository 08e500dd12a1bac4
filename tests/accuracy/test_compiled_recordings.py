"""Compiled code and eager code recorded on a GPU: every allocation and free, in order, with its bytes and its block.

Source: the memory snapshots of github.com/sungdk0822/CS336-assignment2-systems at 849f31e (memory_snapshots/attn; torch
2.6 on an A100): plain attention without a mask as a function, 8 sequences, inputs that need gradients, widths 16 to 128
and lengths 256 to 16,384 one after the other in one process. Of each there are three files: compiled, forward
(_forwardpassonly_compile.pickle); eager, forward (_forwardpassonly); eager, forward, mean squared error and backward.
In each of the 60 each of 100 recorded calls takes and releases the same.
"""

from __future__ import annotations

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.trace.events import EventKind, Trace
from memprof.virtual import VirtualGpu

pytest.importorskip("triton", reason="Inductor writes no kernels for a GPU without it")

SEQUENCES = 8
FREED = [0, 1, 3, 2, 4, 5]  # Which of the six is released first.


def recorded(width: int, length: int) -> list[tuple[str, int]]:
    """The scores, the rows' maxima, their sums and the maxima's positions, the probabilities, the result."""
    rows, scores = SEQUENCES * length, SEQUENCES * length * length
    taken = [4 * scores, 4 * rows, 4 * rows, 8 * rows, 4 * scores, 4 * rows * width]
    return [*(("take", size) for size in taken), *(("give", block) for block in FREED)]


# Scores, one value a row, its position (8 bytes), the result; of the loss: what its sum is staged in, and itself. P: a
# row's maximum with its position, where the scores are too many for 32-bit indices.
EAGER = {
    "forward": "S0 S1 -S0 R0 M0 P0 -P0 -R0 S2 R1 S3 O0 -S1 -S3 -R1 -S2 -M0 -O0",
    "forward and backward": (
        "S0 S1 -S0 R0 M0 P0 -P0 -R0 S2 R1 S3 O0 -S1 O1 O2 a0 b0 -b0 -a0 -O2 c0 O3 O4 S4 -O3 -S3 -O4 S5 S6 S7 S8 -S7 "
        "-S6 -S5 S9 R2 -S8 -S4 -R1 -R2 S10 -S9 -S2 S11 R3 -S11 S12 -R3 -M0 -S12 S13 -S10 O5 O6 -S13 -O6 -O5 -c0 -O0 -O1"
    ),
}


def recorded_eager(width: int, length: int, what: str) -> list[tuple[str, int]]:
    elements, rows = SEQUENCES * length * width, SEQUENCES * length
    sizes = {"S": 4 * rows * length, "R": 4 * rows, "M": 8 * rows, "O": 4 * elements, "c": 4}
    if elements >= 131_072:
        sizes |= {"a": min(elements // 2048, 1728), "b": 4}
    if rows * length >= 2**31:
        sizes["P"] = 16 * rows
    blocks: dict[str, int] = {}
    found = []
    for token in EAGER[what].split():
        name = token.lstrip("-")
        if name[0] not in sizes:
            continue
        if token == name:
            blocks[name] = len(blocks)
            found.append(("take", sizes[name[0]]))
        else:
            found.append(("give", blocks[name]))
    return found


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
    [((16,), (1024, 4096)), ((16, 32, 64, 128), LENGTHS)],
)
@pytest.mark.nightly
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


@pytest.mark.parametrize("what", EAGER)
@pytest.mark.parametrize(
    ("widths", "lengths"),
    [((16,), (256, 1024, 16384)), pytest.param((16, 32, 64, 128), LENGTHS, marks=pytest.mark.nightly)],
)
def test_the_same_attention_that_is_not_compiled(widths: tuple[int, ...], lengths: tuple[int, ...], what: str) -> None:
    with VirtualGpu(find_gpu("a100-80gb")) as gpu:
        for width in widths:
            for length in lengths:
                inputs = [torch.randn(SEQUENCES, length, width, device="cuda", requires_grad=True) for _ in range(3)]
                label = torch.randn_like(inputs[0])

                def call() -> None:
                    out = attention(*inputs)  # noqa: B023
                    if what != "forward":
                        loss = torch.nn.functional.mse_loss(out, label)  # noqa: B023
                        loss.backward()

                call()
                call()  # gradients are there from now on, as there
                since = len(gpu.trace.events)
                call()
                assert seen(gpu.trace, since) == recorded_eager(width, length, what), (width, length)
