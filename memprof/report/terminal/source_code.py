"""Lines of the program's source, to show beside what is said of them."""

from __future__ import annotations

import linecache
from pathlib import Path


def read_code(source: str, folder: Path) -> str | None:
    """Return the code at a source `file:line function`, whose file is relative to `folder`, without indentation; None
    if it is not there, as of a library, whose files are named relative to where it is installed."""
    path, _, line = (source.rpartition(" ")[0] or source).rpartition(":")
    if not (path and line.isdecimal()):
        return None
    return linecache.getline(str(folder / path), int(line)).strip() or None
