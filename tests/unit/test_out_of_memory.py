"""An error is explained and goes on; what explains it neither takes its place nor stays switched on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import memprof
from memprof import out_of_memory as module
from memprof.allocator import Settings
from memprof.device.catalog import custom_gpu
from memprof.errors import MemprofError, UsageError
from memprof.flows.gpus import RunAllocator
from memprof.trace.snapshot_file import read_snapshot
from memprof.units import GIB, MIB
from memprof.virtual import VirtualGpu


def fill(num_mib: int) -> list[torch.Tensor]:
    return [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(num_mib // 64)]


def small_gpu() -> VirtualGpu:
    gpu = custom_gpu(GIB)
    return VirtualGpu(gpu, memory=lambda trace: RunAllocator(trace, gpu, Settings(torch.__version__)), raises_oom=True)


def test_a_full_gpu_is_explained_and_the_error_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "oom.pickle"
    with small_gpu():
        with pytest.raises(torch.OutOfMemoryError), memprof.catch_oom(path):
            fill(1024)
        history = torch.cuda.memory._snapshot()["device_traces"]
    assert not any(history)  # it is no longer recorded
    told = capsys.readouterr().err
    assert "Ran out of memory" in told and "test_out_of_memory.py" in told and "Try in order" in told
    assert read_snapshot(path).segments


def test_a_block_that_fits_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_gpu(), memprof.catch_oom(tmp_path / "oom.pickle"):
        fill(128)
    assert not list(tmp_path.iterdir()) and not capsys.readouterr().err


def test_without_a_gpu_the_block_runs(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), memprof.catch_oom(tmp_path / "oom.pickle"):
        _ = 1 / 0


def test_what_cannot_be_explained_is_raised_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise MemprofError("no space")

    monkeypatch.setattr(module, "analyze_file", fail)
    with (
        small_gpu(),
        pytest.raises(torch.OutOfMemoryError),
        memprof.catch_oom(tmp_path / "oom.pickle"),
    ):
        fill(1024)
    assert "could not be explained: no space" in capsys.readouterr().err


def test_another_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(UsageError) as error, memprof.catch_oom(path):
        pytest.fail("the block began")
    assert error.value.hint == 'change snapshot="oom.pickle", or remove it'
    assert path.read_text() == "mine"
