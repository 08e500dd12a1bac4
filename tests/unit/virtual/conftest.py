"""The virtual GPU that most tests of one look at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memprof.device.catalog import Gpu, find_gpu
from memprof.virtual import VirtualGpu, device_properties


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[VirtualGpu]:
    """Of the model that the file calls GPU, else an A100."""
    gpu = getattr(request.module, "GPU", None)
    model = gpu if isinstance(gpu, Gpu) else find_gpu("a100-80gb")
    with VirtualGpu(model, workspaces=False) as virtual:
        yield virtual


@pytest.fixture
def recorded_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries of torch 2.11 or newer, CUDA 13.0 and cuDNN 9.19, whatever is installed: as on the recorded GPU."""
    release = max(device_properties.torch_release(), (2, 11))
    monkeypatch.setattr(device_properties, "torch_release", lambda: release)
