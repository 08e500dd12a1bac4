"""The virtual GPU that most tests of one look at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memprof.device.catalog import Gpu, find_gpu
from memprof.virtual import VirtualGpu


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[VirtualGpu]:
    """Of the model that the file calls GPU, else an A100."""
    gpu = getattr(request.module, "GPU", None)
    model = gpu if isinstance(gpu, Gpu) else find_gpu("a100-80gb")
    with VirtualGpu(model, workspaces=False) as virtual:
        yield virtual
