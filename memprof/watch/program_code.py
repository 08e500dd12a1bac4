"""Test whether code belongs to the user's program, as opposed to Python's library, torch or memprof."""

from __future__ import annotations

import sys
import sysconfig
from types import CodeType

import torch
import typing_extensions

TORCH_DIR = str(torch.__path__[0])
_DEPRECATIONS_FILE = typing_extensions.__file__  # torch wraps renamed functions in its `deprecated`.
_PYTHON_DIR = sysconfig.get_path("stdlib")
MEMPROF_DIR = __file__.rsplit("/watch/", 1)[0]
WORKLOAD_DIR = MEMPROF_DIR + "/workload/"  # memprof's own code that builds a model and steps
COMMANDS_DIR = MEMPROF_DIR + "/flows/"  # memprof's own code that runs a program, or a workload
GENERATED_CODE_FOLDERS: list[str] = []  # folders into which a running compiler writes generated code


def is_program(code: CodeType) -> bool:
    """Return whether `code` belongs to the program; memprof's own workloads count as programs."""
    return is_program_file(code.co_filename)


def is_program_class(kind: type) -> bool:
    """Return whether the class `kind` belongs to the program."""
    file_name = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file_name is not None and is_program_file(file_name)


def is_memprof_class(kind: type) -> bool:
    """Return whether the class `kind` is memprof's own, and not of a workload, which counts as a program."""
    file_name = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return file_name.startswith(MEMPROF_DIR) and not file_name.startswith(WORKLOAD_DIR)


def is_own_file(file_name: str) -> bool:
    """Return whether the file `file_name` is of the program itself: not of an installed library, nor of memprof."""
    return is_program_file(file_name) and "-packages" not in file_name and not file_name.startswith(MEMPROF_DIR)


def is_program_file(file_name: str) -> bool:
    """Return whether the code in the file `file_name` belongs to the program."""
    if file_name.startswith(_PYTHON_DIR) and "-packages" not in file_name:
        return False
    return not (
        file_name.startswith(
            (TORCH_DIR, _DEPRECATIONS_FILE, "<frozen", "<string>", "<eval_with_key>", *GENERATED_CODE_FOLDERS)
        )
        or (file_name.startswith(MEMPROF_DIR) and not file_name.startswith(WORKLOAD_DIR))
    )
