"""Inputs of a cached result other than its options: the interpreter, installed packages, memprof itself, and the
environment variables that torch and its libraries read.

Versions do not suffice: files of an installed package may be edited in place, and a checkout has one version for
years. So a result is cached with a stamp of every Python file that its run loaded, and is valid while no file changes.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from memprof.flows.cache.store import CACHE_VARIABLE

_PACKAGE = Path(__file__).resolve().parents[2]
_BEGIN_NS = time.time_ns() - 10**10  # ten seconds before this import: all files are loaded later
# Prefixes of variables that torch, transformers, PEFT, bitsandbytes, Triton or Python itself read.
_PREFIXES = (
    "ACCELERATE", "ATEN", "BITSANDBYTES", "BNB", "CUBLAS", "CUDA", "CUDNN", "DISABLE_", "ENABLE_", "FLA", "FORCE_",
    "HF_", "HIP", "KERNELS", "LOCAL_", "MASTER_", "MEMPROF", "NCCL", "NVIDIA", "PEFT", "PYTHON", "PYTORCH", "RANK",
    "ROCM", "TORCH", "TRANSFORMERS", "TRITON", "USE_", "WORLD_", "XFORMERS",
)  # fmt: skip
_PACKAGES = (".dist-info", ".egg-info", ".egg-link", ".pth", ".py", ".so", ".pyd", ".zip")

Stamp = tuple[str, int, int]  # of a file: path, bytes, time of the last change in nanoseconds


def describe_environment(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return interpreter, import path, digests of installed packages and of memprof, and variables, as JSON values."""
    return {
        "python": [sys.version, sys.executable, sys.prefix],
        "path": list(sys.path),
        "installed": _digest(_importable_names(sys.path)),
        "memprof": _digest(f"{path}\0{size}\0{time}" for path, size, time in sorted(_stamps(_own_files()))),
        "environment": {
            name: value
            for name, value in sorted(environ.items())
            if name.startswith(_PREFIXES) and name not in (CACHE_VARIABLE, "PYTHONPYCACHEPREFIX")
        },
    }


def loaded_files() -> list[Stamp] | None:
    """Return the stamps of all Python files that this process loaded; None if a file may have changed since."""
    from memprof.workload.pool import loaded_module_files  # imports torch, as the run did

    stamps = sorted(_stamps(loaded_module_files()))
    return None if any(changed > _BEGIN_NS for _, _, changed in stamps) else stamps


def are_unchanged(stamps: Iterable[Any]) -> bool:
    """Return whether all files still have the size and time of their stamps."""
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
    """Yield the paths of memprof's files, or of the zip file that memprof is imported from."""
    if _PACKAGE.is_dir():
        yield from _files_below(str(_PACKAGE))
    else:
        yield from (str(file) for file in _PACKAGE.parents if file.is_file())


def _files_below(folder: str) -> Iterator[str]:
    """Yield the paths of all files below a folder, except Python's byte code."""
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (os.path.join(parent, name) for name in files)


def _importable_names(folders: Iterable[str]) -> Iterator[str]:
    """Yield the names of importable files and packages in these folders; .dist-info names have versions."""
    for folder in folders:
        try:
            names = sorted(os.listdir(folder or "."))
        except OSError:  # a zip file, or not there
            names = []
        yield folder
        yield from (name for name in names if name.endswith(_PACKAGES) or "." not in name)


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode(errors="surrogateescape") + b"\n")
    return digest.hexdigest()
