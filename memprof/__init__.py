"""memprof: shows where the GPU memory of a PyTorch run goes, simulated without a GPU or measured on one.

    with memprof.virtual_gpu("h100-80gb") as gpu:
        ...            # your code, unmodified; "cuda" is the virtual GPU
    print(gpu.report())

    with memprof.virtual_gpus(8, rank=3) as gpus:
        ...            # eight GPUs for one process, or for one rank of a distributed program

    memprof.profile(train_step, model, optimizer, batch)  # calls train_step twice on a virtual GPU; returns a report

    memprof.sweep(model="gpt2", batch_size=[1, 2, 4], gpu=["t4", "rtx-4090"])  # says which of these fit

    memprof.apply(model, ["chunked-loss"])  # applies fixes to your model

    with memprof.catch_oom():  # explains an out-of-memory error, and keeps a snapshot
        ...

    memprof.load("run.memprof")  # loads a saved capture or report

    @memprof.stub("package.module.name", source=...)  # for a package that cannot be installed without a GPU
    def name(...): ...

Public names are imported when first used, so that `import memprof` is fast. docs/python.md describes them all.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memprof.version import __version__

__all__ = [
    "MemprofError",
    "RunFailedError",
    "TargetSpec",
    "UsageError",
    "__version__",
    "apply",
    "catch_oom",
    "kernel",
    "load",
    "profile",
    "stub",
    "sweep",
    "virtual_gpu",
    "virtual_gpus",
]

if TYPE_CHECKING:
    from memprof.api import apply, profile, sweep, virtual_gpu, virtual_gpus
    from memprof.errors import MemprofError, RunFailedError, UsageError
    from memprof.flows.saved_files import load
    from memprof.out_of_memory import catch_oom
    from memprof.spec import TargetSpec
    from memprof.stubs.registry import stub
    from memprof.stubs.tools import kernel

# Modules of public names that need no torch; the other names are in api.py.
_MODULES_BY_NAME = {
    "MemprofError": "errors",
    "RunFailedError": "errors",
    "TargetSpec": "spec",
    "UsageError": "errors",
    "catch_oom": "out_of_memory",
    "kernel": "stubs.tools",
    "load": "flows.saved_files",
    "stub": "stubs.registry",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"memprof.{_MODULES_BY_NAME.get(name, 'api')}"), name)
    raise AttributeError(f"module 'memprof' has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """Load memprof's magics into a notebook: `%load_ext memprof` (docs/html.md)."""
    from memprof.notebook import register

    register(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
