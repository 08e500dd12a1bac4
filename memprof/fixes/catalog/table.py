"""The table of fixes: the entries that stand above functions in the files of `memprof/fixes`.

They are read and not imported: those files need torch, and who asks for fixes may not have it.
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
    """The entries of the files in a folder. They are written in Python, with the names of `fix.py` and no others.
    Raises MemprofError: the folder has no such files."""
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".py")), key=lambda file: file.name)
    if not files:
        problem = "memprof is installed without its source files, in which the fixes are described"
        raise MemprofError(problem, value=folder, hint="install it with them: compiled files alone are not enough")
    for file in files:
        for entry, function in _marked(file.read_text(encoding="utf-8")):
            found = eval(compile(entry, str(file), "eval"), dict(vars(names)))
            yield dataclasses.replace(found, install=f"memprof.fixes.{file.name.removesuffix('.py')}:{function}")


def _marked(text: str) -> Iterator[tuple[str, str]]:
    """Yield the entries in a file, as they are written, and the functions that they stand above."""
    found = _MARK.findall(text)
    if len(found) == text.count("@Fix("):
        yield from found
        return
    # Written otherwise than here: all of it is parsed, which takes longer than the rest of the table.
    for function in (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)):
        for mark in function.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "Fix":
                yield ast.unparse(mark), function.name


def in_order(entries: Iterable[Fix]) -> dict[str, Fix]:
    """Return the entries by name, in their order. Raises ValueError: two have one name or one place."""
    found: dict[str, Fix] = {}
    for entry in sorted(entries, key=lambda entry: entry.order):
        if entry.name in found or any(entry.order == other.order for other in found.values()):
            raise ValueError(f"two fixes are {entry.name}, or have place {entry.order}")
        found[entry.name] = entry
    return found


# In the order in which they are switched on, whatever the order in which they were named.
FIXES = in_order(read_entries(importlib.resources.files("memprof") / "fixes"))
