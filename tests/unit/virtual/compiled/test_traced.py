"""What AOTAutograd made in one run serves the next: the same record, what was said among it; and only where it may."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._functorch.config as functorch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from memprof.catalog import find_gpu
from memprof.trace.events import Trace
from memprof.virtual import VirtualGpu
from memprof.virtual.compiled.reuse import shared
from tests.unit.virtual.compiled.test_reuse import seen

pytest.importorskip("triton", reason="Inductor writes no kernels for a card without it")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.up = nn.Linear(64, 192), nn.Parameter(torch.empty(16, 1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).view(4, 512, 3, 4, 16).permute(2, 0, 3, 1, 4).half()
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return Frugal.apply(mixed.float().reshape(-1, 16), self.up)


class Frugal(torch.autograd.Function):
    """Keeps its inputs alone, and computes the product again: a compiled graph keeps it all the same."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.relu(x @ weight).square()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad * 2 * torch.relu(x @ weight)
        return grad @ weight.t(), x.t() @ grad


def run(
    around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext, **options: object
) -> Trace:
    # Off, nothing of functions like `Frugal` is kept: torch has more than its key to say of them.
    allowed = functorch.patch(autograd_cache_allow_custom_autograd_functions=True)
    with allowed, VirtualGpu(find_gpu("a100-80gb")) as gpu:
        model = torch.compile(Attention().cuda(), **options)
        for _ in range(3):
            x = torch.randn(4, 512, 64, device="cuda", requires_grad=True)
            with around():
                model(x).sum().backward()
    return gpu.trace


@pytest.fixture(autouse=True)
def _no_counts() -> None:
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def kept() -> Iterator[None]:
    with shared():
        yield


def hits() -> int:
    return torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]


def said(trace: Trace) -> list[object]:
    return [*seen(trace), trace.compiled_keeps, trace.graph_ends, trace.graphed]


def test_a_run_with_what_was_traced_before_has_the_same_record() -> None:
    alone = run()
    assert hits() == 0
    with shared():
        first, again = run(), run()
    assert hits() == 1
    assert said(first) == said(alone) == said(again)
    assert again.compiled_keeps
    assert any("scaled_dot_product_attention" in sentence for sentence in again.assumptions)
    assert first.compiling is not None and again.compiling is not None
    # How long it takes is told as without.
    assert again.compiling.seconds > 0.5 * first.compiling.seconds


@pytest.mark.usefixtures("kept")
def test_other_kernels_of_attention_are_traced_anew() -> None:
    run()
    other = run(lambda: sdpa_kernel(SDPBackend.MATH))
    assert hits() == 0
    assert any("math backend" in sentence for sentence in other.assumptions)
    assert not any("flash backend" in sentence for sentence in other.assumptions)


@pytest.mark.usefixtures("kept")
def test_graphs_of_cuda_are_made_of_every_run() -> None:
    first, again = (run(mode="reduce-overhead") for _ in range(2))
    assert hits() == 0
    assert first.graphed and said(first) == said(again)


@pytest.mark.usefixtures("kept")
def test_what_cannot_be_written_down_is_made_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from torch._functorch._aot_autograd.aot_autograd_result import GenericAOTAutogradResult

    def refuse(entry: object) -> None:
        raise TypeError("not this")

    monkeypatch.setattr(GenericAOTAutogradResult, "pre_save", refuse)
    first, again = run(), run()
    assert hits() == 0
    assert said(first) == said(again)
    assert "not this" not in capfd.readouterr().err
