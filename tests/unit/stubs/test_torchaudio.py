"""torchaudio whose compiled part cannot be loaded: its operators are there inside a run, and allocate."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.stubs.extension import StubExtension
from memprof.virtual import VirtualGpu
from tests.unit.stubs.test_flash_attention import measured

UTILITIES = """
def _load_lib(lib):
    raise OSError(f"Could not load this library: {lib}")
"""
EXTENSION = """
import torch
from .utils import _load_lib

loaded = _load_lib("_torchaudio") and _load_lib("libtorchaudio")
version, aligns = torch.ops._torchaudio.cuda_version(), torch.ops._torchaudio.is_align_available()
"""
BATCH, TIME, TARGET, CLASSES = 2, 50, 11, 32


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torchaudio whose libraries are for another torch: importing it fails."""
    folder = tmp_path / "torchaudio" / "_extension"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("from . import _extension\n")
    (folder / "__init__.py").write_text(EXTENSION)
    (folder / "utils.py").write_text(UTILITIES)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchaudio"]:
        del sys.modules[name]


@pytest.fixture
def gpu(package: None) -> Iterator[VirtualGpu]:
    with VirtualGpu(find_gpu("a100-80gb"), workspaces=False, extensions=[StubExtension()]) as gpu:
        import torchaudio

        assert torchaudio._extension.aligns and torchaudio._extension.version is None
        yield gpu


def lengths() -> list[torch.Tensor]:
    return [torch.full((BATCH,), size, device="cuda", dtype=torch.int32) for size in (TIME, TARGET - 1)]


def test_a_transducers_loss_makes_its_gradient_at_once(gpu: VirtualGpu) -> None:
    logits = torch.empty(BATCH, TIME, TARGET, CLASSES, device="cuda")
    targets = torch.ones(BATCH, TARGET - 1, device="cuda", dtype=torch.int32)
    of_both = lengths()
    call = torch.ops.torchaudio.rnnt_loss_forward
    stays, peak, (costs, gradients) = measured(lambda: call(logits, targets, *of_both, 0, -1.0, True))
    assert (costs.shape, gradients.shape) == ((BATCH,), logits.shape)
    assert stays == 4 * BATCH + 4 * logits.numel()
    places = BATCH * TIME * TARGET
    assert peak == stays + 4 * 5 * places + 4 * 2 * BATCH * TARGET
    with pytest.raises(RuntimeError, match="float32 or float16"):
        call(logits.double(), targets, *of_both, 0, -1.0, True)
    with pytest.raises(RuntimeError, match="target length mismatch"):
        call(logits, targets[:, 1:].contiguous(), *of_both, 0, -1.0, True)
    assert any("torchaudio's compiled operators" in line for line in gpu.trace.assumptions)


@pytest.mark.parametrize(("frames", "kept"), [(50, 2 * 50), (250, 3 * 100)])
def test_an_alignment_keeps_a_hundred_frames_on_the_gpu(gpu: VirtualGpu, frames: int, kept: int) -> None:
    """While one hundred is copied for the host, the copy before it is still there."""
    scores = torch.empty(1, frames, CLASSES, device="cuda")
    targets = torch.tensor([[3, 4, 5]], device="cuda")
    ends = [torch.full((1,), size, device="cuda") for size in (frames, 3)]
    stays, peak, (paths, same) = measured(lambda: torch.ops.torchaudio.forced_align(scores, targets, *ends, 0))
    assert (paths.shape, paths.dtype, same.data_ptr()) == ((1, frames), torch.int64, scores.data_ptr())
    states = 2 * 3 + 1
    assert (stays, peak) == (8 * frames, max(8 * frames, kept * states + 4 * 2 * states))


def test_a_filter_writes_where_it_is_told(gpu: VirtualGpu) -> None:
    signal, coefficients, padded = (torch.zeros(size, device="cuda") for size in ((1, 1, 100), (1, 3), (1, 1, 102)))
    call: Any = torch.ops.torchaudio._lfilter_core_loop
    stays, peak, made = measured(lambda: call(signal, coefficients, padded))
    assert (stays, peak, made.data_ptr()) == (0, 0, padded.data_ptr())
    with pytest.raises(RuntimeError, match="lengths"):
        call(signal, coefficients, signal)


@pytest.mark.usefixtures("package")
def test_without_stubs_it_cannot_be_imported() -> None:
    with VirtualGpu(find_gpu("a100-80gb")), pytest.raises(OSError, match="Could not load"):
        import torchaudio  # noqa: F401
