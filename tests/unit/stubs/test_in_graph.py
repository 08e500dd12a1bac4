"""Stubs inside a graph of torch.compile allocate there what they allocate eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memprof
from memprof.device.catalog import find_gpu
from memprof.stubs import registry
from memprof.stubs.extension import StubExtension
from memprof.virtual import VirtualGpu

pytest.importorskip("triton", reason="Inductor writes no kernels for a GPU without it")
GPU = find_gpu("h100-80gb")
BATCH, TOKENS, HEADS, SIZE = 2, 512, 8, 64
WIDTH = HEADS * SIZE


class Attention(nn.Module):
    """With what says where sequences end in the closure of the call."""

    def __init__(self) -> None:
        super().__init__()
        from flash_attn import flash_attn_varlen_func

        self.attend = flash_attn_varlen_func
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inner(x).view(-1, 3, HEADS, SIZE).unbind(1)
        out = self.attend(query, key, value, bounds, bounds, TOKENS, TOKENS, causal=True)
        return self.outer(out.flatten(1))


def run(compiled: Callable[[Any], Any]) -> tuple[list[int], list[str]]:
    """Sizes of the float32 tensors that two steps make beyond the first megabyte, and what the run rests on."""
    with VirtualGpu(GPU, workspaces=False, extensions=[StubExtension()]) as gpu:
        model = Attention().cuda().bfloat16()
        first = len(gpu.trace.storages)
        call = compiled(model)
        bounds = torch.arange(0, (BATCH + 1) * TOKENS, TOKENS, dtype=torch.int32, device="cuda")
        for _ in range(2):
            x = torch.empty(BATCH * TOKENS, WIDTH, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            call(x, bounds).sum().backward()
    made = [storage.num_bytes for storage in gpu.trace.storages[first:] if storage.dtype == "float32"]
    return [size for size in made if size > 1 << 20], gpu.trace.assumptions


def test_a_graph_keeps_flash_attention_whole_with_its_scratch_memory() -> None:
    eager, _ = run(lambda model: model)
    compiled, told = run(lambda model: torch.compile(model, fullgraph=True))
    accumulated = 4 * (BATCH * TOKENS + 128 * BATCH) * WIDTH  # of the queries' gradient
    assert compiled == eager == [accumulated] * 2
    assert any(line.startswith("flash_attn is not installed") for line in told)
    assert not any("eagerly" in line for line in told)


def test_what_shares_memory_with_an_argument_still_does() -> None:
    """A kernel that saves a part of its input, and gives a part of what it makes."""

    @memprof.stub("made_up.halves", source="here@v1:halves.cu", in_graph=True)
    def halves(x: torch.Tensor) -> Any:
        def forward(given: torch.Tensor) -> Any:
            made = torch.empty_like(given)
            return made[:, : WIDTH // 2], (given[:, : WIDTH // 2], made)

        def backward(saved: Any, gradient: torch.Tensor) -> Any:
            part, made = saved
            assert part.shape[1] == gradient.shape[1] and made.shape[1] == WIDTH
            return (torch.empty_like(made),)

        return memprof.kernel(forward, backward, x)

    try:
        with VirtualGpu(GPU, workspaces=False, extensions=[StubExtension()]) as gpu:
            import made_up

            call = torch.compile(lambda x: made_up.halves(x * 2).sum(), fullgraph=True)
            x = torch.empty(TOKENS, WIDTH, device="cuda", requires_grad=True)
            call(x).backward()
            del call
        assert x.grad is not None and x.grad.shape == x.shape
        assert not any("eagerly" in line for line in gpu.trace.assumptions)
    finally:
        registry.unregister("made_up")
