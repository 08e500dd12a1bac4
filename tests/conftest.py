"""What every test shares: nothing may leak from one, where the project's shared data lies, how cores are divided.

Several workers on one machine share its cores. torch in each of them, and in each process that a test starts, would
take all cores for itself, and two processes that both do so wait for each other.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
if _workers:
    # Before torch is imported, which reads it once; the processes that tests start inherit it.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _workers)))


_SLOWEST = (
    "cli/test_verify.py",
    "accuracy/test_training_rows.py",
    "accuracy/test_operators_against_cpu.py",
    "unit/workload/test_npt.py",
    "cli/test_ladder.py",
    "docs/test_docs.py",
    "recipes/",
    "cli/test_monitor.py",
    "accuracy/",
    "cli/",
    "unit/remedies/",
)
"""Begin with these, slowest first: what begins last leaves the other workers without work until it ends."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow modules first; workers take modules in this order (`--no-loadscope-reorder`)."""
    items.sort(key=lambda item: next((i for i, part in enumerate(_SLOWEST) if f"tests/{part}" in item.nodeid), 99))


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
    gpu = sys.modules.get("memprof.virtual.gpu")
    if gpu is not None and gpu._active is not None:
        leaks.append("a virtual GPU is active")
    return leaks


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """No test leaves a virtual GPU or a torch mode behind."""
    assert not _leaks(), "leaked from an earlier test"
    yield
    assert not _leaks()


_num_modules = 0


@pytest.fixture(autouse=True)
def libraries_are_no_garbage() -> None:
    """The collector leaves alone what libraries made when they were imported: millions of objects that live for good.

    Looking through them took two thirds of a second, in tests that collect garbage most of their time.
    """
    global _num_modules
    if len(sys.modules) > _num_modules:
        gc.collect()
        gc.freeze()
        _num_modules = len(sys.modules)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of published measurements beside the checkout; it is not part of the repository."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"no shared data: {folder} is not there")
    return folder
