"""What hides GPUs from CUDA."""

import os

import pytest

from memprof.device import visible
from memprof.device.gpus import NvmlGpu, NvmlSample


@pytest.mark.parametrize(("gpus", "left"), [((), None), ((NvmlGpu(0, "NVIDIA H100 80GB HBM3"),), "")])
def test_gpus_are_hidden_where_there_are_any(monkeypatch, gpus, left):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # put back when the test ends
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(visible, "read_gpus", lambda: NvmlSample(gpus))
    visible.hide_gpus()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == left
