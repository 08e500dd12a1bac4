"""What every test shares: nothing may leak from one, and where the project's shared data lies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


def _leaks() -> list[str]:
    """What a virtual GPU that was not left would still hold; no torch, no leak."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "utils"):
        return []
    leaks = []
    if torch._C._len_torch_function_stack():
        leaks.append("a torch function mode is active")
    if torch.utils._python_dispatch._len_torch_dispatch_stack():
        leaks.append("a torch dispatch mode is active")
    gpu = sys.modules.get("memprof.capture.virtual.gpu")
    if gpu is not None and gpu._active is not None:
        leaks.append("a virtual GPU is active")
    return leaks


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """No test leaves a virtual GPU or a torch mode behind."""
    assert not _leaks(), "leaked from an earlier test"
    yield
    assert not _leaks()


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of published measurements beside the checkout; it is not part of the repository."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"no shared data: {folder} is not there")
    return folder
