"""Test whether code belongs to the program, as opposed to Python, torch or memprof."""

from __future__ import annotations

import sysconfig
from types import CodeType

import torch
import typing_extensions

TORCH_DIR = str(torch.__path__[0])
_DEPRECATIONS_FILE = typing_extensions.__file__  # torch wraps functions in it that have another name now.
_PYTHON_DIR = sysconfig.get_path("stdlib")
MEMPROF_DIR = __file__.rsplit("/watch/", 1)[0]
WORKLOAD_DIR = MEMPROF_DIR + "/workload/"  # memprof's own code that builds a model and steps
GENERATED_CODE_FOLDERS: list[str] = []  # folders that a compiler writes code into, while there are any


def is_program(code: CodeType) -> bool:
    """Return whether `code` belongs to the program; memprof's own workloads are programs."""
    return is_program_file(code.co_filename)


def is_program_file(name: str) -> bool:
    """Return whether the code in the file `name` belongs to the program."""
    if name.startswith(_PYTHON_DIR) and "-packages" not in name:
        return False
    return not (
        name.startswith(
            (TORCH_DIR, _DEPRECATIONS_FILE, "<frozen", "<string>", "<eval_with_key>", *GENERATED_CODE_FOLDERS)
        )
        or (name.startswith(MEMPROF_DIR) and not name.startswith(WORKLOAD_DIR))
    )
