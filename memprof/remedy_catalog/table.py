"""The table of remedies: the entries that stand above functions in the files of `memprof/remedies`.

They are read and not imported: those files need torch, and who asks for remedies may not have it.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

from memprof.remedy_catalog import remedy as names
from memprof.remedy_catalog.remedy import Remedy


def read_entries(folder: Path) -> Iterator[Remedy]:
    """The entries of the files in a folder. They are written in Python, with the names of `remedy.py` and no others."""
    for file in sorted(folder.glob("*.py")):
        text = file.read_text(encoding="utf-8")
        body = ast.parse(text).body if "@Remedy(" in text else []
        for function in (node for node in body if isinstance(node, ast.FunctionDef)):
            for mark in function.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "Remedy":
                    entry = eval(compile(ast.Expression(mark), str(file), "eval"), dict(vars(names)))
                    yield dataclasses.replace(entry, install=f"memprof.remedies.{file.stem}:{function.name}")


def in_order(entries: Iterable[Remedy]) -> dict[str, Remedy]:
    """The entries by name, in their order.

    Raises:
        ValueError: two have one name or one place.
    """
    found: dict[str, Remedy] = {}
    for entry in sorted(entries, key=lambda entry: entry.order):
        if entry.name in found or any(entry.order == other.order for other in found.values()):
            raise ValueError(f"two remedies are {entry.name}, or have place {entry.order}")
        found[entry.name] = entry
    return found


REMEDIES = in_order(read_entries(Path(__file__).parents[1] / "remedies"))
"""In the order in which they are switched on, whatever the order in which they were named."""
