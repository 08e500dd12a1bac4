"""Compiled modules of an engine: an import defines their operators, which run on the virtual GPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.stubs.vllm import binaries
from memprof.virtual import VirtualGpu
from tests.unit.stubs.vllm.test_schemas import write_library

PACKAGE = "engine_with_binaries"
CONSTANTS = b"\0".join(
    (
        b"",
        b"fill(Tensor! out, Tensor input) -> ()",
        b"double_rows(Tensor input) -> Tensor",
        b"is_supported(int capability) -> bool",
        b"",
    )
)


@binaries.meta("_engine_C.double_rows")
def double_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((2 * tensor.shape[0], *tensor.shape[1:]))


@binaries.query("_engine_C.is_supported")
def is_supported(capability: int) -> bool:
    return capability >= 90


@pytest.fixture
def finder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A package with a compiled module that has operators, and one without; yields what was assumed."""
    folder = tmp_path / PACKAGE
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    write_library(folder / "_engine_C.abi3.so", {".rodata": CONSTANTS})
    write_library(folder / "_C.abi3.so", {".rodata": b"\0scale(Tensor! out, float by) -> ()\0"})
    write_library(folder / "_C_stable_libtorch.abi3.so", {".rodata": b"\0shift(Tensor! out, float by) -> ()\0"})
    write_library(folder / "copies_C.abi3.so", {".rodata": b"\0text\0"})
    monkeypatch.syspath_prepend(tmp_path)
    assumed: list[str] = []
    monkeypatch.setattr(sys, "meta_path", [binaries.BinaryFinder(PACKAGE, lambda: assumed.append("")), *sys.meta_path])
    yield assumed
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def test_operators_run_on_the_virtual_gpu(finder):
    importlib.import_module(f"{PACKAGE}._engine_C")
    assert finder == [""]
    with VirtualGpu(find_gpu("h100-80gb")) as gpu:
        rows = torch.zeros(1024, 8, device="cuda")
        before = gpu.recorder.storages.live_bytes
        assert torch.ops._engine_C.fill(rows, rows) is None
        assert gpu.recorder.storages.live_bytes == before
        doubled = torch.ops._engine_C.double_rows(rows)
        assert doubled.shape == (2048, 8) and doubled.is_cuda
        assert gpu.recorder.storages.live_bytes == before + 2048 * 8 * 4
        assert torch.ops._engine_C.is_supported(90) and not torch.ops._engine_C.is_supported(89)


def test_a_module_without_operators_can_be_imported_and_not_used(finder):
    module = importlib.import_module(f"{PACKAGE}.copies_C")
    assert finder == []
    with VirtualGpu(find_gpu("h100-80gb")), pytest.raises(MemprofError, match=r"copies_C\.copy"):
        module.copy(1)


def test_two_modules_of_one_namespace(finder):
    for name in ("_C", "_C_stable_libtorch"):
        importlib.import_module(f"{PACKAGE}.{name}")
    with VirtualGpu(find_gpu("h100-80gb")):
        rows = torch.zeros(16, device="cuda")
        for operator in (torch.ops._C.scale, torch.ops._C.shift):
            assert operator(rows, 2.0) is None
