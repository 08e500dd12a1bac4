"""`driver(gpu, ...)`: from then on pynvml talks to GPUs that a test made up."""

from __future__ import annotations

import pynvml
import pytest

from tests.unit.device.driver import FakeDriver


@pytest.fixture
def driver(monkeypatch):
    def install(*gpus, **options):
        fake = FakeDriver(*gpus, **options)
        monkeypatch.setattr(pynvml, "nvmlLib", fake)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return fake

    return install
