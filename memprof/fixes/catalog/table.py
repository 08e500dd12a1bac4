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

_DECORATOR = re.compile(r"^@(Fix\(.*?\))(?: *#[^\n]*)?\ndef (\w+)\(", re.MULTILINE | re.DOTALL)


def read_fixes(folder: Traversable) -> Iterator[Fix]:
    """Yield the fix of each `@Fix(...)` decorator in the Python files of `folder`, evaluated with names of `fix.py`.
    Raises MemprofError if the folder has no Python files."""
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".py")), key=lambda file: file.name)
    if not files:
        problem = "memprof is installed without its source files, in which the fixes are described"
        raise MemprofError(problem, value=folder, hint="install it with them: compiled files alone are not enough")
    for file in files:
        for entry, function in _iter_decorators(file.read_text(encoding="utf-8")):
            fix = eval(compile(entry, str(file), "eval"), dict(vars(names)))
            yield dataclasses.replace(fix, install=f"memprof.fixes.{file.name.removesuffix('.py')}:{function}")


def _iter_decorators(text: str) -> Iterator[tuple[str, str]]:
    """Yield (source text of the `Fix(...)` call, name of the decorated function) for each such decorator in `text`."""
    matches = _DECORATOR.findall(text)
    if len(matches) == text.count("@Fix("):
        yield from matches
        return
    # The regular expression misses an entry: the whole file is parsed, which is slow.
    for function in (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)):
        for decorator in function.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "Fix":
                yield ast.unparse(decorator), function.name


def sort_fixes(entries: Iterable[Fix]) -> dict[str, Fix]:
    """Return a dict of the fixes by name, sorted by `order`; raise ValueError if two have the same name or order."""
    fixes: dict[str, Fix] = {}
    for entry in sorted(entries, key=lambda entry: entry.order):
        if entry.name in fixes or any(entry.order == fix.order for fix in fixes.values()):
            raise ValueError(f"two fixes are {entry.name}, or have place {entry.order}")
        fixes[entry.name] = entry
    return fixes


# All fixes by name, in the order in which fixes are applied.
FIXES = sort_fixes(read_fixes(importlib.resources.files("memprof") / "fixes"))
