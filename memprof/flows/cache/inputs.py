"""Inputs of a cached result other than its options: the interpreter, installed packages, memprof itself, and the
environment variables that torch and its libraries read.

Versions do not suffice: files of an installed package may be edited in place, and a checkout has one version for
years. So a result is cached with a stamp of every Python file that its run loaded, and is valid while no file changes.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from memprof.flows.cache.store import CACHE_VARIABLE

_PACKAGE_FOLDER = Path(__file__).resolve().parents[2]
_START_TIME_NS = time.time_ns() - 10**10  # ten seconds before this import: all files are loaded later
# Prefixes of variables that torch, transformers, PEFT, bitsandbytes, Triton or Python itself read.
_VARIABLE_PREFIXES = (
    "ACCELERATE", "ATEN", "BITSANDBYTES", "BNB", "CUBLAS", "CUDA", "CUDNN", "DISABLE_", "ENABLE_", "FLA", "FORCE_",
    "HF_", "HIP", "KERNELS", "LOCAL_", "MASTER_", "MEMPROF", "NCCL", "NVIDIA", "PEFT", "PYTHON", "PYTORCH", "RANK",
    "ROCM", "TORCH", "TRANSFORMERS", "TRITON", "USE_", "WORLD_", "XFORMERS",
)  # fmt: skip
_IMPORTABLE_SUFFIXES = (".dist-info", ".egg-info", ".egg-link", ".pth", ".py", ".so", ".pyd", ".zip")

_CODE_SUFFIXES = (".py", ".toml", ".json", ".zip")  # of files of memprof that change an answer

Stamp = tuple[str, int, int]  # of a file: path, bytes, time of the last change in nanoseconds


def describe_environment(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the interpreter, import path, hashes of the installed packages and of memprof's files, and environment
    variables, as JSON values."""
    return {
        "python": [sys.version, sys.executable, sys.prefix],
        "path": list(sys.path),
        "installed": _hash_lines(_iter_importable_names(sys.path)),
        "memprof": _hash_lines(
            f"{path}\0{size}\0{mtime_ns}" for path, size, mtime_ns in sorted(_stamp_files(_iter_memprof_files()))
        ),
        "environment": {
            name: value
            for name, value in sorted(environ.items())
            if name.startswith(_VARIABLE_PREFIXES) and name not in (CACHE_VARIABLE, "PYTHONPYCACHEPREFIX")
        },
    }


@functools.cache
def hash_memprof_code() -> str:
    """Return a digest of the content of memprof's Python files and tables, the same on every machine."""
    digest = hashlib.sha256()
    for path in sorted(_iter_memprof_files()):
        if path.endswith(_CODE_SUFFIXES):
            digest.update(os.path.relpath(path, _PACKAGE_FOLDER).encode() + b"\0" + Path(path).read_bytes())
    return digest.hexdigest()


def stamp_loaded_files() -> list[Stamp] | None:
    """Return the stamp of every Python file that this process loaded; None if a file may have changed since loading."""
    from memprof.workload.pool import loaded_module_files  # imports torch, as the run did

    stamps = sorted(_stamp_files(loaded_module_files()))
    return None if any(mtime_ns > _START_TIME_NS for _, _, mtime_ns in stamps) else stamps


def are_files_unchanged(stamps: Iterable[Any]) -> bool:
    """Return whether every file still has the size and modification time of its stamp."""
    try:
        for path, size, mtime_ns in stamps:
            status = os.stat(path)
            if status.st_size != size or status.st_mtime_ns != mtime_ns:
                return False
    except (OSError, TypeError, ValueError):
        return False
    return True


def _stamp_files(files: Iterable[str]) -> Iterator[Stamp]:
    for file in files:
        try:
            status = os.stat(file)
        except OSError:  # in a zip file, or made by a program
            continue
        yield file, status.st_size, status.st_mtime_ns


def _iter_memprof_files() -> Iterator[str]:
    """Yield the paths of memprof's files, or of the zip file that memprof is imported from."""
    if _PACKAGE_FOLDER.is_dir():
        yield from _walk_files(str(_PACKAGE_FOLDER))
    else:
        yield from (str(file) for file in _PACKAGE_FOLDER.parents if file.is_file())


def _walk_files(folder: str) -> Iterator[str]:
    """Yield the paths of all files below a folder, except Python's byte code."""
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (os.path.join(parent, name) for name in files)


def _iter_importable_names(folders: Iterable[str]) -> Iterator[str]:
    """Yield each folder, and the names of the importable files and packages in it."""
    for folder in folders:
        try:
            names = sorted(os.listdir(folder or "."))
        except OSError:  # a zip file, or not there
            names = []
        yield folder
        yield from (name for name in names if name.endswith(_IMPORTABLE_SUFFIXES) or "." not in name)


def _hash_lines(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode(errors="surrogateescape") + b"\n")
    return digest.hexdigest()
