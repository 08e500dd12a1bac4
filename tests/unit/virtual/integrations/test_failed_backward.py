"""A backward pass that runs out of memory leaves nothing behind once its error is gone."""

from __future__ import annotations

import pytest
import torch

from tests.unit.virtual.test_refusals import MIB, small_gpu


def make_loss(weight: torch.Tensor) -> torch.Tensor:
    """Return a loss whose backward needs more than its forward, in which several nodes wait for their turn."""
    parts = [weight]
    for _ in range(3):
        parts.append(parts[-1].relu())
    return torch.stack([part.mean() for part in parts]).sum()


def test_what_a_failed_backward_has_saved_is_freed():
    with small_gpu():
        weight = torch.ones(180 * MIB // 4, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        with pytest.raises(torch.OutOfMemoryError):
            make_loss(weight).backward()
        assert torch.cuda.memory_allocated() == before
