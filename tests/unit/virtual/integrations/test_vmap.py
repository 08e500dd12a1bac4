"""Calls of torch.func.vmap in the trace: the rows of each, who called it, and what it allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import functional
from torch.func import hessian, jacfwd, jacrev, vmap

import memprof
from memprof.trace.events import EventKind, Trace


def record(function: Callable[[torch.Tensor], Any]) -> Trace:
    with memprof.virtual_gpu("h100-80gb") as gpu:
        function(torch.ones(6, device="cuda"))
    return gpu.trace


def batched_gradient(x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients of each element, to `x`, and to another tensor, which may have none."""
    x.requires_grad_()
    other.requires_grad_()
    rows = torch.eye(6, device="cuda")
    first, second = torch.autograd.grad(cube(x), (x, other), rows, is_grads_batched=True, allow_unused=True)
    assert first.shape == (6, 6) and (second is None) == (other is not x)
    return first, second


def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (vmap(cube), [("vmap", 6)]),
        (vmap(cube, chunk_size=4), [("vmap", 4), ("vmap", 2)]),
        (jacrev(cube), [("jacrev", 6)]),
        (jacrev(cube, chunk_size=4), [("jacrev", 4), ("jacrev", 2)]),
        (jacfwd(cube), [("jacfwd", 6)]),
        (hessian(lambda x: cube(x).sum()), [("jacrev", 1), ("jacfwd", 6)]),
        (lambda x: functional.jacobian(cube, x, vectorize=True), [("autograd.functional.jacobian", 6)]),
        (
            lambda x: functional.hessian(lambda y: cube(y).sum(), x, vectorize=True),
            [("autograd.functional.hessian", 6)],
        ),
        (lambda x: batched_gradient(x, x), [("autograd.grad", 6)]),
        (lambda x: batched_gradient(x, torch.ones(6, device="cuda")), [("autograd.grad", 6)]),
        (cube, []),
    ],
)
def test_rows_and_function(function: Callable[[torch.Tensor], Any], calls: list[tuple[str, int]]) -> None:
    assert [(call.function, call.rows) for call in record(function).vmaps] == calls


def test_its_events_and_line() -> None:
    trace = record(vmap(cube))
    (call,) = trace.vmaps
    made = [
        trace.op(trace.storages[ref]) for kind, ref in trace.events[call.begin : call.end] if kind is EventKind.ALLOC
    ]
    assert made == ["aten.pow"] and trace.source_at(call.source).endswith(" record")


def test_a_call_that_raises_is_recorded_too() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise KeyError(cube(x).shape)

    with memprof.virtual_gpu("h100-80gb") as gpu, pytest.raises(KeyError):
        vmap(fail)(torch.ones(6, device="cuda"))
    assert [call.rows for call in gpu.trace.vmaps] == [6]
