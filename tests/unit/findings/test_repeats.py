"""repeat() along dimensions of one element, where expand() would do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import memprof
from memprof.findings.proposals import repeats
from memprof.units import MIB
from tests.unit.full_gpu import run_out_of_memory
from tests.unit.traces import TraceBuilder

MASK = 512  # 1 MiB in float32


@pytest.mark.parametrize(
    ("repeat", "copies"),
    [
        (lambda mask: mask[None].repeat(4, 1, 1), 1),
        (lambda mask: mask.repeat(4, 1, 1), 1),
        (lambda mask: mask[None].repeat(1, 1, 1), 0),
        (lambda mask: mask.repeat(4, 1), 0),  # no view
        (lambda mask: mask[None].repeat(4, 2, 1), 0),
        (lambda mask: mask[None].expand(4, -1, -1) + 1, 0),
        (lambda mask: mask[:128].repeat(4, 1, 1), 1),  # 1 MiB
        (lambda mask: mask[:127].repeat(4, 1, 1), 0),
    ],
)
def test_copies_that_a_view_would_be(repeat: Callable[[torch.Tensor], torch.Tensor], copies: int) -> None:
    with memprof.virtual_gpu("h100-80gb") as gpu:
        repeat(torch.zeros(MASK, MASK, device="cuda"))
    assert len(gpu.trace.repeats) == copies


def test_one_for_which_there_is_no_memory() -> None:
    context = run_out_of_memory(lambda: torch.zeros(MASK, MASK, device="cuda").repeat(512, 1, 1), 400 * MIB)
    (proposal,) = repeats.propose(context)
    assert proposal.change.startswith("use expand() instead of repeat() at findings/test_repeats.py:")
    assert proposal.trace.storages[context.ledger.trace.repeats[0]].num_bytes == 0


def test_of_the_line_with_most_at_the_peak() -> None:
    b = TraceBuilder()
    early = b.alloc(50 * MIB, line="model.py:1 mask")
    b.free(early)
    at_peak = [b.alloc(30 * MIB, line="model.py:2 mask") for _ in range(2)]
    b.trace.repeats = [early, *at_peak]
    (proposal,) = repeats.propose(b.context())
    assert "model.py:2" in proposal.change
    b.trace.repeats = [early]
    assert not list(repeats.propose(b.context()))
