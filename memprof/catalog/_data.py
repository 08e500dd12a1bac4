"""Reading the catalog's data files.

The parsers are imported on the first read, since `import memprof.catalog` is on the way of every command, `--help` too,
and they are most of its time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
_FOLDER = os.path.join(os.path.dirname(__file__), "data")


def read_toml(*parts: str) -> dict[str, Any]:
    """The contents of the TOML file at `parts` below the data folder."""
    import tomllib

    with open(os.path.join(_FOLDER, *parts), "rb") as file:
        return tomllib.load(file)


@cache
def read_json(*parts: str) -> dict[str, Any]:
    """The contents of the JSON file (an object) at `parts` below the data folder; not to be changed."""
    import json

    with open(os.path.join(_FOLDER, *parts), encoding="utf-8") as file:
        contents: dict[str, Any] = json.load(file)
    return contents


def first_by_name(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """By name; the first that has a name keeps it."""
    found: dict[str, T] = {}
    for name, one in named:
        found.setdefault(name, one)
    return found
