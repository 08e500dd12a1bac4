"""The GPU that is here, as options of a virtual one."""

import pytest

from memprof.device.context import CONTEXT_BYTES
from memprof.device.gpus import NvmlGpu, NvmlSample, Slice
from memprof.flows import local_gpu


@pytest.mark.parametrize(("visible", "size"), [("", 5), ("MIG-two", 20)])
def test_a_slice_is_not_taken_for_its_gpu(monkeypatch, visible, size):
    slices = tuple(
        Slice(index, "MIG", f"MIG-{name}", index, total << 30, 0, total << 30)
        for index, (name, total) in enumerate((("one", 5), ("two", 20)))
    )
    gpu = NvmlGpu(0, "NVIDIA A100-SXM4-40GB", total_bytes=40 << 30, slices=slices)
    monkeypatch.setattr(local_gpu, "read_gpus", lambda: NvmlSample((gpu,)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert local_gpu.find_local_gpu_options() == {"gpu_vram_bytes": size << 30}


def test_a_slice_that_cannot_be_read_is_no_gpu(monkeypatch):
    gpu = NvmlGpu(0, "NVIDIA H100 80GB HBM3", total_bytes=80 << 30, slices=(Slice(0, "MIG", "", 0, None, None, None),))
    monkeypatch.setattr(local_gpu, "read_gpus", lambda: NvmlSample((gpu,)))
    assert local_gpu.find_local_gpu_options() == {}


GIB = 1 << 30


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ("One", 78 * GIB, 60 * GIB)), ("1", ("Two", 24 * GIB, 9 * GIB)), ("1,0", ("Two", 24 * GIB, 9 * GIB)),
        ("GPU-bb", ("Two", 24 * GIB, 9 * GIB)), ("2", None), ("", None), ("-1", None), ("MIG-bb", None),
    ],
)  # fmt: skip
def test_the_gpu_that_a_run_would_be_measured_on_is_told_without_cuda(monkeypatch, visible, expected):
    gpus = (
        NvmlGpu(0, "One", "GPU-aa", 80 * GIB, 8 * GIB, 60 * GIB + CONTEXT_BYTES, 2 * GIB),
        NvmlGpu(1, "Two", "GPU-bb", 24 * GIB, 15 * GIB, 9 * GIB + CONTEXT_BYTES, 0),
    )
    monkeypatch.setattr(local_gpu, "read_gpus", lambda: NvmlSample(gpus))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert local_gpu.find_local_gpu() == expected


def test_a_gpu_that_nvml_does_not_read_is_not_told(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(local_gpu, "read_gpus", lambda: NvmlSample((NvmlGpu(0, "One", "GPU-aa"),)))
    assert local_gpu.find_local_gpu() is None
