"""Inputs of an answer beside what was asked: the interpreter, what is installed, memprof itself, and the variables
of the environment that torch and its libraries read.

Versions do not say everything: files of an installed package may be edited in place, and a checkout has one version for
years. So an answer is kept with every file of Python that was loaded for it, and holds as long as none has changed.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from memprof.flows.cache.store import VARIABLE

_PACKAGE = Path(__file__).resolve().parents[2]
_BEGIN_NS = time.time_ns() - 10**10  # ten seconds before this process came here: whatever it loads, it loaded since
# Of variables that torch, transformers, PEFT, bitsandbytes, Triton or Python itself read.
_PREFIXES = (
    "ACCELERATE", "ATEN", "BITSANDBYTES", "BNB", "CUBLAS", "CUDA", "CUDNN", "DISABLE_", "ENABLE_", "FLA", "FORCE_",
    "HF_", "HIP", "KERNELS", "LOCAL_", "MASTER_", "MEMPROF", "NCCL", "NVIDIA", "PEFT", "PYTHON", "PYTORCH", "RANK",
    "ROCM", "TORCH", "TRANSFORMERS", "TRITON", "USE_", "WORLD_", "XFORMERS",
)  # fmt: skip
_PACKAGES = (".dist-info", ".egg-info", ".egg-link", ".pth", ".py", ".so", ".pyd", ".zip")

Stamp = tuple[str, int, int]  # a file: path, bytes, and when it was changed, in nanoseconds


def describe_environment(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return all of it, as plain JSON values."""
    return {
        "python": [sys.version, sys.executable, sys.prefix],
        "path": list(sys.path),
        "installed": _digest(_installed(sys.path)),
        "memprof": _digest(f"{path}\0{size}\0{time}" for path, size, time in sorted(_stamps(_own_files()))),
        "environment": {
            name: value
            for name, value in sorted(environ.items())
            if name.startswith(_PREFIXES) and name not in (VARIABLE, "PYTHONPYCACHEPREFIX")
        },
    }


def loaded_files() -> list[Stamp] | None:
    """Return all files of Python that this process has loaded, as they are; None if one may have changed since."""
    from memprof.workload.pool import loaded_module_files  # imports torch, as the run that was answered did

    stamps = sorted(_stamps(loaded_module_files()))
    return None if any(changed > _BEGIN_NS for _, _, changed in stamps) else stamps


def unchanged(stamps: Iterable[Any]) -> bool:
    """Return whether all these files are as they were."""
    try:
        for path, size, changed in stamps:
            status = os.stat(path)
            if status.st_size != size or status.st_mtime_ns != changed:
                return False
    except (OSError, TypeError, ValueError):
        return False
    return True


def _stamps(files: Iterable[str]) -> Iterator[Stamp]:
    for file in files:
        try:
            status = os.stat(file)
        except OSError:  # in a zip file, or made by a program
            continue
        yield file, status.st_size, status.st_mtime_ns


def _own_files() -> Iterator[str]:
    """Give memprof's files, or the zip file that it is imported from."""
    if _PACKAGE.is_dir():
        yield from _sources(str(_PACKAGE))
    else:
        yield from (str(file) for file in _PACKAGE.parents if file.is_file())


def _sources(folder: str) -> Iterator[str]:
    """Yield all files below, its tables and pages too; not the byte code that Python keeps beside them."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name != "__pycache__":
                    yield from _sources(entry.path)
            else:
                yield entry.path


def _installed(folders: Iterable[str]) -> Iterator[str]:
    """Yield what can be imported from these folders, with versions where it was installed."""
    for folder in folders:
        try:
            names = sorted(os.listdir(folder or "."))
        except OSError:  # a zip file, or not there
            names = []
        yield folder
        yield from (name for name in names if name.endswith(_PACKAGES) or "." not in name)


def _digest(lines: Iterable[str]) -> str:
    made = hashlib.sha256()
    for line in lines:
        made.update(line.encode(errors="surrogateescape") + b"\n")
    return made.hexdigest()
