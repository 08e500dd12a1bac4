"""The virtual GPU with stubs; what their kernels keep for a backward is what they save, which is gone with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.stubs import tools
from memprof.stubs.extension import StubExtension
from memprof.virtual import VirtualGpu


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[VirtualGpu]:
    """An A100, or the module's GPU."""
    model = getattr(request.module, "GPU", None) or find_gpu("a100-80gb")
    with VirtualGpu(model, workspaces=False, extensions=[StubExtension()]) as virtual:
        yield virtual


@pytest.fixture(autouse=True)
def _backwards_keep_no_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tensor that the function holds lives as long as the loss does, which programs keep into their next step."""
    original = tools._Kernel.forward
    held: list[tuple[str, int, str]] = []

    def forward(ctx: Any, run: Any, backward: Any, *inputs: Any) -> Any:
        code = getattr(backward, "__code__", None)
        for name, cell in zip(code.co_freevars, backward.__closure__ or (), strict=True) if code else ():
            if any(tensor.is_floating_point() for tensor in _tensors(cell.cell_contents)):
                held.append((code.co_filename, code.co_firstlineno, name))
        return original(ctx, run, backward, *inputs)

    monkeypatch.setattr(tools._Kernel, "forward", staticmethod(forward))
    yield
    assert not held


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, (tuple, list)) else []
