"""What Inductor made in one run serves the next: the same record, and the same graph of another function is not it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from memprof.catalog import find_gpu
from memprof.trace.events import Trace
from memprof.virtual import VirtualGpu
from memprof.virtual.compiled.reuse import shared

pytest.importorskip("triton", reason="Inductor writes no kernels for a card without it")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def one(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).sin()


def another(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).sin()


def run(program: Callable[..., torch.Tensor], *, rows: int = 64, card: str = "a100-80gb") -> Trace:
    with VirtualGpu(find_gpu(card)) as gpu:
        model = program.cuda() if isinstance(program, nn.Module) else program
        x = torch.randn(rows, 64, device="cuda", requires_grad=True)
        torch.compile(model)(x).sum().backward()
    return gpu.trace


def seen(trace: Trace) -> list[object]:
    # The names of generated files have the folder of their run in them.
    sources = [re.sub(r"/[^ ]*/memprof-inductor-[^/]*/", "", source) for source in trace.sources]
    assert trace.compiling is not None
    return [trace.events, trace.storages, trace.ops, sources, trace.modules, trace.assumptions, trace.compiling.kernels]


@pytest.fixture(autouse=True)
def _no_counts() -> None:
    torch._dynamo.utils.counters.clear()


def hits() -> int:
    return torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]


def test_a_run_with_code_of_the_one_before_has_the_same_record() -> None:
    alone, other_rows = run(Block()), run(Block(), rows=32)
    assert hits() == 0
    with shared():
        first, again, other = run(Block()), run(Block()), run(Block(), rows=32)
        assert hits() == 2  # forward and backward of the second
        run(Block(), card="h100-80gb")
        assert hits() == 2
    assert seen(first) == seen(alone) == seen(again)
    assert seen(other) == seen(other_rows)
    assert first.compiling is not None and again.compiling is not None
    # How long it takes is told as without.
    assert again.compiling.seconds > 0.5 * first.compiling.seconds


def test_buffers_of_the_same_graph_have_the_lines_of_their_own_function() -> None:
    with shared():
        traces = run(one), run(another)
    for trace, name in zip(traces, ("one", "another"), strict=True):
        assert any(source.endswith(f" {name}") for source in trace.sources)
        assert not any(source.endswith(" one") for source in trace.sources) or name == "one"
    run(one)
    assert hits() == 0
