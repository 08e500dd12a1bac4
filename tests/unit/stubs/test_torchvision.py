"""torchvision whose compiled part cannot be loaded: its operators are there inside a run, and allocate."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.stubs.extension import StubExtension, extensions
from memprof.virtual import VirtualGpu

EXTENSION = """
import torch

def _has_ops():
    return False

def _check_cuda_version():
    return torch.ops.torchvision._cuda_version() if _has_ops() else -1
"""
PACKAGE = """
import torch
from . import extension
"""
REGISTERS = """
torch.library.register_fake("torchvision::qnms")(lambda boxes, scores, threshold: scores.long())
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torchvision whose library is for another torch."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "torchvision"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE, encoding="utf-8")
    (folder / "extension.py").write_text(EXTENSION, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("torchvision", "torchvision.extension"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("package")
def test_operators_that_cannot_be_loaded_are_stood_in_for(tmp_path: Path) -> None:
    # As the real one does: importing it fails where its operators are not defined.
    (tmp_path / "torchvision/__init__.py").write_text(PACKAGE + REGISTERS, encoding="utf-8")
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False, extensions=extensions()) as gpu:
        import torchvision

        assert torchvision.extension._has_ops()
        assert torchvision.extension._check_cuda_version() == -1
        boxes, scores = torch.rand(1000, 4, device="cuda"), torch.rand(1000, device="cuda")
        before = len(gpu.trace.storages)
        kept = torch.ops.torchvision.nms(boxes, scores, 0.5)
        assert kept.shape == (1000,)
        taken = [storage.num_bytes for storage in gpu.trace.storages[before:]]
        assert 1000 * 16 * 8 in taken  # a bit of each box for every other
    assert not torchvision.extension._has_ops()
    told = [line for line in gpu.trace.assumptions if "torchvision's compiled operators" in line]
    assert len(told) == 1


@pytest.mark.usefixtures("package")
def test_without_stubs_they_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with VirtualGpu(find_gpu("a100-80gb")) as gpu:
        import torchvision.extension as extension

        assert not extension._has_ops()
    assert not any("torchvision" in line for line in gpu.trace.assumptions)


@pytest.mark.usefixtures("package")
def test_operators_that_are_there_stay_the_real_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded() -> bool:
        return True

    import torchvision.extension as extension

    monkeypatch.setattr(extension, "_has_ops", loaded)
    with VirtualGpu(find_gpu("a100-80gb"), extensions=[StubExtension()]) as gpu:
        seen: Any = extension._has_ops
    assert seen is loaded
    assert not any("torchvision" in line for line in gpu.trace.assumptions)
