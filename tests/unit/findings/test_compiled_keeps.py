"""What compiled code keeps for its backward and eager code does not: told with the line, and of nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.findings.compiled_saved_tensors import find
from memprof.flows.account import analyze
from memprof.trace.events import CompiledSavedTensors, Trace
from memprof.trace.io import load_trace, save_trace
from memprof.virtual import VirtualGpu
from tests.unit.traces import TraceBuilder

MIB = 1 << 20
LINE = "model.py:1 forward"


def kept(more_bytes: int, count: int = 2, again: bool = False) -> CompiledSavedTensors:
    return CompiledSavedTensors(1, more_bytes, "aten.mm", LINE, 64 * MIB, count, again)


def found(alive: int, *told: CompiledSavedTensors) -> list[tuple[str, int | None]]:
    b = TraceBuilder()
    for _ in range(alive):
        b.new(16 * MIB)  # float32
    b.new(100 * MIB // 4, op="aten.add")
    b.trace.compiled_keeps += told
    return [(finding.id, finding.num_bytes) for finding in find(b.context())]


def test_calls_are_counted_by_what_is_alive_at_the_peak() -> None:
    assert found(6, kept(70 * MIB)) == [("compiled-keeps", 210 * MIB)]  # three calls of two results
    assert found(1, kept(70 * MIB)) == []
    assert found(0) == found(6) == []


def test_little_of_the_peak_is_not_told() -> None:
    assert found(2, kept(63 * MIB)) == [] != found(2, kept(64 * MIB))
    assert found(30, kept(6 * MIB)) == []  # 90 MiB of 2,020
    assert found(30, kept(7 * MIB)) == [("compiled-keeps", 105 * MIB)]


class Frugal(torch.autograd.Function):
    """Keeps its inputs alone, and computes the product again."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.relu(x @ weight).square()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad * 2 * torch.relu(x @ weight)
        return grad @ weight.t(), x.t() @ grad


class Layer(nn.Module):
    def __init__(self, frugal: bool) -> None:
        super().__init__()
        self.frugal = frugal
        self.up, self.down = nn.Parameter(torch.empty(512, 4096)), nn.Linear(4096, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = Frugal.apply(x, self.up) if self.frugal else torch.relu(x @ self.up).square()
        return x + self.down(inner)


def trained(frugal: bool, **settings: object) -> Trace:
    import torch._functorch.config

    with torch._functorch.config.patch(settings), VirtualGpu(find_gpu("a100-80gb")) as gpu:
        model = torch.compile(nn.Sequential(Layer(frugal), Layer(frugal)).cuda())
        model(torch.empty(8192, 512, device="cuda")).sum().backward()
    return gpu.trace


def test_a_backward_that_saves_memory_loses_that_when_it_is_compiled(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Inductor writes no kernels for a GPU without it")
    save_trace(trained(True), tmp_path / "run.memprof")
    trace = load_trace(tmp_path / "run.memprof")
    (finding,) = [finding for finding in analyze(trace).findings if finding.id == "compiled-keeps"]
    assert finding.num_bytes == 2 * 8192 * 4096 * 4
    product, fix = finding.evidence
    line = Frugal.forward.__code__.co_firstlineno + 3
    assert product.source is not None and product.source.startswith(f"{__file__}:{line} ")
    assert product.text.startswith("2 x 128.00 MiB of aten.mm at ") and "computes it again" in product.text
    assert "cse = False" in fix.text and "activation_memory_budget" in fix.text


@pytest.mark.parametrize(("frugal", "settings"), [(False, {}), (True, {"cse": False})])
def test_plain_code_is_not_told_and_neither_is_what_the_fix_mends(frugal: bool, settings: dict[str, object]) -> None:
    pytest.importorskip("triton", reason="Inductor writes no kernels for a GPU without it")
    assert trained(frugal, **settings).compiled_keeps == []
