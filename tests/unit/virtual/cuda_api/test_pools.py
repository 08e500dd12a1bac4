"""Private pools: what a CUDA graph or a MemPool has taken serves nothing else until it is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memprof
from memprof.allocator import replay_on_gpu
from memprof.api import ProfiledGpu
from memprof.trace.events import EventKind
from memprof.trace.io import load_trace
from memprof.trace.snapshot import SnapshotSegment

MIB = 1 << 20


def take(size: int = 64) -> torch.Tensor:
    return torch.empty(size * MIB, dtype=torch.uint8, device="cuda")


def reserved() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() // MIB


def test_a_graph_keeps_what_it_took() -> None:
    with memprof.virtual_gpu(alloc_conf="") as gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            take()
            result = take()  # in the block of the one before, which the capture has freed
        graph.replay()
        assert (torch.cuda.memory_allocated() // MIB, reserved()) == (64, 64)
        del result
        assert (torch.cuda.memory_allocated(), reserved()) == (0, 64), "the graph keeps its pool"
        outside = take()
        assert reserved() == 128, "which serves nothing else"
        del outside
        graph.reset()
        assert reserved() == 0
    assert gpu.report().peak.reserved_bytes == 128 * MIB


def test_graphs_share_a_pool_until_the_last_is_gone() -> None:
    with memprof.virtual_gpu(alloc_conf=""):
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first):
            take()
        with torch.cuda.graph(second, pool=first.pool()):
            take()
        assert first.pool() == second.pool() and reserved() == 64
        del first
        assert reserved() == 64
        del second
        assert reserved() == 0
        handle = torch.cuda.graph_pool_handle()
        assert handle != torch.cuda.graph_pool_handle()


def test_pools_are_recorded_with_the_line_that_captures() -> None:
    with memprof.virtual_gpu(alloc_conf="") as gpu:
        graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
        for graph in graphs[:2]:
            with torch.cuda.graph(graph):
                take()
        with torch.cuda.graph(graphs[2], pool=graphs[0].pool()):
            take()
    assert [pool.pool for pool in gpu.trace.graph_pools] == [1, 2]
    assert len({pool.source for pool in gpu.trace.graph_pools}) == 1
    assert all(" test_pools_are_recorded" in pool.source for pool in gpu.trace.graph_pools)


def test_graphed_callables() -> None:
    with memprof.virtual_gpu(alloc_conf="") as gpu:
        model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda()
        x = torch.randn(256, 1024, device="cuda")
        graphed: Any = torch.cuda.make_graphed_callables(model, (x,))
        since = len(gpu.trace.events)
        for _ in range(2):
            graphed(x).sum().backward()
        made = [
            gpu.trace.op(gpu.trace.storages[ref]) for kind, ref in gpu.trace.events[since:] if kind is EventKind.ALLOC
        ]
    assert "aten.mm" not in made and "aten.addmm" not in made, "a replay takes nothing"
    assert {one.pool_id for one in segments(gpu)} != {(0, 0)}


def segments(gpu: ProfiledGpu) -> list[SnapshotSegment]:
    return replay_on_gpu(gpu.trace, None).layout_at(len(gpu.trace.events) - 1)[0]


def test_a_pool_of_the_programs_own(tmp_path: Path) -> None:
    with memprof.virtual_gpu(alloc_conf="") as gpu:
        pool = torch.cuda.MemPool()
        weight = torch.ones(4096, 4096, device="cuda", requires_grad=True)
        with torch.cuda.use_mem_pool(pool):
            kept = take()
            (weight * 2).sum().backward()  # its threads take from the default pool
        outside = take(8)
        assert {one.pool_id: one.allocated // MIB for one in segments(gpu) if one.allocated >= 64 * MIB} == {
            (0, 0): 64, pool.id: 64,
        }  # fmt: skip
        del kept, outside, weight
        assert reserved() == 130 and pool.use_count() == 1, "the pool keeps two of 64 MiB, and one for the sum"
        del pool
        assert reserved() == 0
        with pytest.raises(memprof.MemprofError, match="an allocator of its own"):
            torch.cuda.MemPool(object())
    gpu.save(tmp_path / "run.memprof")
    assert load_trace(tmp_path / "run.memprof").events == gpu.trace.events


def test_memory_of_pools_is_exported_as_such() -> None:
    with memprof.virtual_gpu(alloc_conf=""):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            kept = take()
        found = torch.cuda.memory._snapshot()
        assert [segment["segment_pool_id"] for segment in found["segments"]] == [pool.id]
        del kept
