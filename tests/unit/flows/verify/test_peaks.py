"""What a program takes at its peak on the CPU, as the allocator reports it."""

from __future__ import annotations

import torch

from memprof.flows.verify.peaks import measured_peak


def test_the_highest_sum_and_nothing_said(capfd):
    def program(device: str) -> None:
        first = torch.ones(1 << 18, device=device)
        second = torch.ones(1 << 18, device=device)
        del first
        third = torch.ones(1 << 17, device=device)
        del second, third

    assert measured_peak(program, "cpu") == 2 * 4 * (1 << 18)
    # The profiler's library has lines of its own, which go past Python.
    assert capfd.readouterr() == ("", "")
