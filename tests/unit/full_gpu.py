"""Runs a program on a virtual GPU until its memory is full, for whatever is looked for at that moment."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memprof.allocator import GpuMemory, replay_on_gpu
from memprof.device.catalog import find_gpu
from memprof.findings import Context
from memprof.ledger.ledger import build_ledger
from memprof.virtual import VirtualGpu


def run_out_of_memory(program: Callable[[], object], limit_bytes: int) -> Context:
    """Return what rules look at, of a `program` that needs more than `limit_bytes`."""
    gpu = VirtualGpu(find_gpu("h100-80gb"), raises_oom=True)
    storages = gpu.recorder.storages
    storages.find_oom_message = lambda device: "full" if storages.live_bytes > limit_bytes else None
    with pytest.raises(torch.OutOfMemoryError), gpu:
        program()
    assert gpu.trace.ended_out_of_memory
    memory = GpuMemory(limit_bytes, 0)
    return Context(build_ledger(gpu.trace, replay_on_gpu(gpu.trace, memory)), memory.usable_bytes)
