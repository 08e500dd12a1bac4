"""What a program takes at its peak on the CPU, as the allocator reports it."""

from __future__ import annotations

import torch

from memprof.flows.verify.peaks import measure_peak


def test_the_highest_sum_and_nothing_said(capfd):
    def program(device: str) -> None:
        first = torch.ones(1 << 18, device=device)
        second = torch.ones(1 << 18, device=device)
        del first
        third = torch.ones(1 << 17, device=device)
        del second, third

    assert measure_peak(program, "cpu") == 2 * 4 * (1 << 18)
    # The profiler's library has lines of its own, which go past Python.
    assert capfd.readouterr() == ("", "")


def test_on_a_gpu_every_program_takes_its_workspaces_anew(monkeypatch):
    """What the first program's handles keep would be no part of the second's: on an H100, 64 MiB of 190."""
    kept, allocated = [], {"now": 0}

    def program(device: str) -> None:
        if not kept:
            kept.append("workspace")
            allocated["now"] += 64

    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: allocated.update(now=0) or kept.clear(), raising=False
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: allocated["now"])
    assert [measure_peak(program, "cuda") for _ in range(2)] == [64, 64]
