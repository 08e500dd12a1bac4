"""A torch that is made up, for programs that `memprof monitor` watches, and what its allocator is to say.

It is a package of that name on PYTHONPATH, with the calls of `torch.cuda` that the probe uses: initialisation deferred
by `_lazy_call`, and counters as `memory_stats_as_nested_dict` gives them. `hold(bytes)` allocates.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20

TORCH_CUDA = """
import os
import threading

_queued, _initialized, _pid = [], False, os.getpid()
current, peak = {}, {}


def is_initialized():
    return _initialized and os.getpid() == _pid


def _lazy_call(callable, **kwargs):
    callable() if is_initialized() else _queued.append(callable)


def init():
    global _initialized
    for callable in _queued:
        callable()
    _initialized = True


def device_count():
    return 2


class _Properties:
    name, uuid, total_memory = "NVIDIA H100 80GB HBM3", "1111", 85 << 30


def get_device_properties(device):
    return _Properties()


def hold(num_bytes, device=0):
    init() if not _initialized else None
    # The probe's thread may read in between, and gives up an allocator that raises.
    peak[device] = max(peak.get(device, 0), num_bytes)
    current[device] = num_bytes


def reset_peak_memory_stats(device=0):
    peak[device] = current[device]


def memory_stats_as_nested_dict(device):
    assert is_initialized(), "the probe initialised CUDA"
    if device not in current:
        return {name: {"all": {"current": 0, "peak": 0}} for name in ("allocated_bytes", "reserved_bytes")}
    now, most = current[device], peak[device]
    return {
        "requested_bytes": {"all": {"current": now - 1, "peak": most - 1}},
        "allocated_bytes": {"all": {"current": now, "peak": most}},
        "active_bytes": {"all": {"current": now, "peak": most}},
        "reserved_bytes": {"all": {"current": 2 * most, "peak": 2 * most}},
        "num_alloc_retries": 1,
        "num_ooms": 0,
    }
"""


def make_torch(folder: Path) -> Path:
    """Write the package, and return the folder for PYTHONPATH."""
    package = folder / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from torch import cuda\n")
    (package / "cuda").mkdir()
    (package / "cuda" / "__init__.py").write_text(TORCH_CUDA)
    return package.parent


def environment(*folders: Path) -> dict[str, str]:
    """Of a memprof that runs from this checkout; `folders` are on PYTHONPATH."""
    path = os.pathsep.join(map(str, [*folders, ROOT]))
    return {**os.environ, "PYTHONPATH": path, "TERM": "xterm-256color", "COLUMNS": "100"}


def memprof(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "memprof", "monitor", *map(str, arguments)]


def run(*arguments: object, env: dict[str, str], text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        memprof(*arguments), env=env, input=text, capture_output=True, text=True, timeout=60, check=False
    )
