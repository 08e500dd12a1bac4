"""How much of memprof one operator passes: so little that its path can be read from top to bottom."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

import memprof
from memprof.device.catalog import find_gpu
from memprof.trace.events import EventKind
from memprof.virtual import VirtualGpu

MEMPROF = memprof.__file__.removesuffix("__init__.py")
MOST_FILES, MOST_CALLS = 8, 25


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("h100-80gb")) as active:
        yield active


def calls_until_event(gpu: VirtualGpu, run: Callable[[], Any]) -> list[tuple[str, str]]:
    """File and function of each call of memprof's own until the next event is recorded."""
    events = gpu.recorder.trace.events
    before, calls = len(events), []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and len(events) == before and frame.f_code.co_filename.startswith(MEMPROF):
            calls.append((frame.f_code.co_filename.removeprefix(MEMPROF), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    assert events[before].kind is EventKind.ALLOC and gpu.trace.storages[events[before].ref].shape == result.shape
    return calls


@pytest.mark.parametrize("trained", [False, True])
def test_a_product_passes_few_files_and_calls_up_to_its_event(gpu: VirtualGpu, trained: bool) -> None:
    left = torch.ones(64, 32, device="cuda", requires_grad=trained)
    right = torch.ones(32, 16, device="cuda")

    def run() -> torch.Tensor:
        return torch.mm(left, right)

    kept = [run(), run()]  # what is looked up once
    calls = calls_until_event(gpu, run)
    assert kept and calls[0] == ("virtual/function_mode.py", "__torch_function__")
    assert ("virtual/dispatch_mode.py", "__torch_dispatch__") in calls
    assert calls[-1] == ("watch/trace_writer.py", "append_allocation")
    assert len({file for file, _ in calls}) <= MOST_FILES, calls
    assert len(calls) <= MOST_CALLS, calls
