"""Records a training loop as a user would: the allocator's history with stacks, and the peaks step by step."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch


def record_steps(name: str, step: Callable[[], None], steps: int = 3) -> None:
    """Run `step` a few times, write NAME.pickle, and print the peaks of each: allocated and reserved bytes."""
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(max_entries=400_000, stacks="python")
    peaks = []
    for _ in range(steps):
        step()
        torch.cuda.synchronize()
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
        torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._dump_snapshot(f"{name}.pickle")
    torch.cuda.memory._record_memory_history(enabled=None)
    print("peaks of", name, json.dumps(peaks), flush=True)
