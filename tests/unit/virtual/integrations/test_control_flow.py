"""Control flow given as functions runs as plain Python."""

from __future__ import annotations

import pytest
import torch
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu


@pytest.mark.parametrize("taken", [True, False])
def test_cond(gpu: VirtualGpu, taken: bool) -> None:
    x = torch.ones(4, device="cuda", requires_grad=True)
    result = torch.cond(torch.tensor(taken, device="cuda"), lambda a: a * 2, lambda a: a * 3, (x,))
    result.sum().backward()
    assert result.is_cuda and x.grad is not None and x.grad.is_cuda


def test_while_loop(gpu: VirtualGpu) -> None:
    start = (torch.tensor(0, device="cuda"), torch.ones(4, device="cuda"))
    count, _ = while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * 2), start)
    assert count.item() == 3


def test_scan(gpu: VirtualGpu) -> None:
    carry, out = scan(
        lambda c, x: (c + x, c * x), torch.zeros(4, device="cuda"), torch.ones(5, 4, device="cuda"), dim=0
    )
    assert carry.shape == (4,) and out.shape == (5, 4) and out.is_cuda


def test_gradients_pass_what_a_loop_is_given(gpu: VirtualGpu) -> None:
    x = torch.ones(5, 4, device="cuda", requires_grad=True)
    _, out = scan(lambda c, x: (c + x, c * x), torch.zeros(4, device="cuda"), x, dim=0)
    out.sum().backward()
    assert x.grad is not None and x.grad.is_cuda


def test_a_compiled_function_has_one(gpu: VirtualGpu) -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def both(a: torch.Tensor) -> torch.Tensor:
        a = torch.cond(a.sum() > 0, lambda a: a * 2, lambda a: a * 3, (a,))
        return while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * 2), (torch.tensor(0), a))[1]

    assert both(torch.ones(4, device="cuda")).is_cuda


def test_operators_are_put_back() -> None:
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False):
        pass
    assert torch.cond(torch.tensor(True), lambda a: a * 2, lambda a: a * 3, (torch.ones(1),)).item() == 2
    assert "dispatch" not in vars(torch.ops.higher_order.cond)
