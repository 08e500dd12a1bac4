"""What hides GPUs from CUDA, and which GPU is its first."""

from __future__ import annotations

import os

import pytest

from memprof.device import visible
from memprof.device.gpus import NvmlGpu, NvmlSample

GPUS = (NvmlGpu(0, "A", "GPU-aa1"), NvmlGpu(1, "B", "GPU-bb2"))


@pytest.mark.parametrize(("gpus", "left"), [((), None), (GPUS, "")])
def test_gpus_are_hidden_where_there_are_any(monkeypatch, gpus, left):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # put back when the test ends
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(visible, "read_gpus", lambda: NvmlSample(gpus))
    visible.hide_gpus()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == left


@pytest.mark.parametrize(
    ("value", "first"),
    [(None, 0), ("0", 0), (" 1 ,0", 1), ("2", None), ("", None), ("-1", None), ("GPU-bb", 1), ("GPU-bb2,0", 1),
     ("GPU-cc", None), ("bb2", None), ("MIG-bb2", None)],
)  # fmt: skip
def test_the_first_gpu_that_cuda_sees(monkeypatch, value, first):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value or "")
    if value is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible.find_first_visible_gpu(GPUS) == (None if first is None else GPUS[first])
    assert visible.find_first_visible_gpu(()) is None
