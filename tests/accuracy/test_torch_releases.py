"""Measurements under older releases of torch than the installed one, simulated with `torch_release`."""

from __future__ import annotations

import csv
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import memprof
from tests.benchmarks.recordings import compare, read_snapshot, trace_window

ROWS = 5
TILEGYM = "NVIDIA/TileGym PR #65"


def measure_head(tokens: int) -> float:
    """Return what TileGym's benchmark of a head with 32,768 words prints, in MiB.

    NVIDIA/TileGym, tests/benchmark/bench_fused_linear_cross_entropy.py at d966a0ad, backend torch.
    """
    hidden = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(32768, 1024, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, 32768, (tokens,), device="cuda")

    def compute_loss(*arguments: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(*arguments), targets)

    def run_once() -> None:
        loss = compute_loss(hidden.detach().requires_grad_(), weight.detach().clone().requires_grad_())
        loss.backward()

    for _ in range(2):
        run_once()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run_once()
    return torch.cuda.max_memory_allocated() / 2**20


def test_a_head_on_blackwell_before_2_12(shared_dir: Path) -> None:
    """Two workspaces of 8.125 MiB, where torch 2.12 takes 32 each: to the last digit that was published."""
    with (shared_dir / "published_2026.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["source"].startswith(TILEGYM)]
    assert len(rows) == ROWS
    for row in rows:
        with memprof.virtual_gpu("rtx-5070-ti", torch_release="2.9"):
            assert round(measure_head(int(row["batch"])), 3) == float(row["value"])


def test_a_recording_of_2_4(shared_dir: Path) -> None:
    """Each product with a bias takes and releases 1 MiB: every allocation, in order, and what is reserved.

    shreyansh26/MLSys-Experiments, model_memory_usage/profile_grad.py.
    """
    with (shared_dir / "snapshots" / "shrey_grad.pickle").open("rb") as file:
        recorded = read_snapshot(file)
    with memprof.virtual_gpu("h100-80gb", torch_release="2.4") as gpu:
        model = nn.Linear(10_000, 50_000, device="cuda")
        for _ in range(3):
            inputs = torch.randn(5_000, 10_000, device="cuda")
            outputs = model(inputs)
    del inputs, outputs
    result = compare(recorded, trace_window(gpu.trace, 0, len(gpu.trace.events), "2.4"))
    assert (result.matched, result.extra) == (result.recorded, 0) == (12, 0)
    assert result.simulated_peak == result.recorded_peak
    assert result.simulated_reserved == result.recorded_reserved
