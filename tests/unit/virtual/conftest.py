"""The virtual GPU that most tests of one look at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memprof.catalog import find_gpu
from memprof.virtual import VirtualGpu


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False) as virtual:
        yield virtual
