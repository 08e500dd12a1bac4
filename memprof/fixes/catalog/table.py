"""The table of fixes: the `Fix` decorators of functions in the files of `memprof/fixes`.

The entries are read from the source text and not imported, because the files import torch, which may be missing.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.resources
import re
from collections.abc import Iterable, Iterator
from importlib.resources.abc import Traversable

from memprof.errors import MemprofError
from memprof.fixes.catalog import fix as names
from memprof.fixes.catalog.fix import Fix

_MARK = re.compile(r"^@(Fix\(.*?\))(?: *#[^\n]*)?\ndef (\w+)\(", re.MULTILINE | re.DOTALL)


def read_entries(folder: Traversable) -> Iterator[Fix]:
    """Yield the entries of the files in a folder: Python expressions that use only names of `fix.py`.
    Raises MemprofError: the folder has no Python files."""
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".py")), key=lambda file: file.name)
    if not files:
        problem = "memprof is installed without its source files, in which the fixes are described"
        raise MemprofError(problem, value=folder, hint="install it with them: compiled files alone are not enough")
    for file in files:
        for entry, function in _iter_decorators(file.read_text(encoding="utf-8")):
            found = eval(compile(entry, str(file), "eval"), dict(vars(names)))
            yield dataclasses.replace(found, install=f"memprof.fixes.{file.name.removesuffix('.py')}:{function}")


def _iter_decorators(text: str) -> Iterator[tuple[str, str]]:
    """Yield the source text of each entry in a file, and the name of the decorated function."""
    found = _MARK.findall(text)
    if len(found) == text.count("@Fix("):
        yield from found
        return
    # The regular expression misses an entry: the whole file is parsed, which is slow.
    for function in (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)):
        for mark in function.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "Fix":
                yield ast.unparse(mark), function.name


def in_order(entries: Iterable[Fix]) -> dict[str, Fix]:
    """Return the entries by name, sorted by `order`. Raises ValueError: two entries have the same name or order."""
    found: dict[str, Fix] = {}
    for entry in sorted(entries, key=lambda entry: entry.order):
        if entry.name in found or any(entry.order == other.order for other in found.values()):
            raise ValueError(f"two fixes are {entry.name}, or have place {entry.order}")
        found[entry.name] = entry
    return found


# All fixes by name, in the order in which fixes are applied.
FIXES = in_order(read_entries(importlib.resources.files("memprof") / "fixes"))
