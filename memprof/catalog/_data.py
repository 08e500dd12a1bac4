"""Reading the catalog's data files, of a package in a zip file too.

The parsers are imported on the first read, since `import memprof.catalog` is on the way of every command, `--help` too,
and they are most of its time.
"""

from __future__ import annotations

from functools import cache
from typing import Any


def read_text(*parts: str) -> str:
    """Return the contents of the file at `parts` below the data folder; raise FileNotFoundError if there is none."""
    from importlib import resources

    return resources.files("memprof.catalog").joinpath("data", *parts).read_text(encoding="utf-8")


def read_toml(*parts: str) -> dict[str, Any]:
    """Return the contents of the TOML file at `parts` below the data folder."""
    import tomllib

    return tomllib.loads(read_text(*parts))


@cache
def read_json(*parts: str) -> dict[str, Any]:
    """Return the contents of the JSON file (an object) at `parts` below the data folder; not to be changed."""
    import json

    contents: dict[str, Any] = json.loads(read_text(*parts))
    return contents
