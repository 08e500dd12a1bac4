"""Which tensors of the host an operator on the GPU takes (the database of operators: tests/accuracy)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from memprof.virtual import VirtualGpu


def host(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="cuda")


ALLOWED: dict[str, Callable[[], Any]] = {
    "number on the right": lambda: on_gpu(3) * host(),
    "number on the left": lambda: host() - on_gpu(3),
    "number to where": lambda: torch.where(on_gpu(3) > 0, on_gpu(3), host()),
    "indices": lambda: on_gpu(5, 2)[torch.tensor([1, 2])],
    "indices to write at": lambda: on_gpu(5).index_put_([torch.tensor([1, 2])], host()),
    "a view's copy": lambda: torch.slice_scatter(on_gpu(4), host(2), 0, 0, 2),
    "shape": lambda: host(2).resize_as_(on_gpu(4)),
}
REFUSED: dict[str, Callable[[], Any]] = {
    "number for a matrix product": lambda: torch.addmm(host(), on_gpu(2, 3), on_gpu(3, 2)),
    "limit of clamp": lambda: on_gpu(3).clamp(min=host()),
    "vector": lambda: on_gpu(3) + host(3),
    "vector beside nothing": lambda: torch.mm(host(0, 2), on_gpu(2, 0)),
    "values to write": lambda: torch.index_put(on_gpu(5), [torch.tensor([0, 1])], host(2)),
    "values of the GPU in a host tensor": lambda: host(5).index_put_([torch.tensor([0, 1])], on_gpu(2)),
    "compared in C++": lambda: torch.block_diag(on_gpu(2, 2), host(2, 2)),
    "compared in Python": lambda: torch.addr(host(2, 2), on_gpu(2), on_gpu(2)),
}


@pytest.mark.parametrize("call", ALLOWED.values(), ids=ALLOWED)
def test_allowed(gpu: VirtualGpu, call: Callable[[], Any]) -> None:
    call()
    assert gpu.trace.mismatches == []


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_refused_and_goes_on(gpu: VirtualGpu, call: Callable[[], Any]) -> None:
    call()
    assert len(gpu.trace.mismatches) == 1


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_lengths_of_ctc_loss(gpu: VirtualGpu, place: str) -> None:
    scores = torch.randn(50, 4, 32, device="cuda", requires_grad=True)
    targets = torch.randint(1, 32, (4, 20), device=place)
    lengths = torch.full((4,), 50, device=place), torch.full((4,), 20, device=place)
    F.ctc_loss(scores.log_softmax(2), targets, *lengths).backward()
    assert gpu.trace.mismatches == []
    assert scores.grad is not None and scores.grad.is_cuda
