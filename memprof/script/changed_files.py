"""Running a program with another text than its files have: the files stay as they are, and so do their names."""

from __future__ import annotations

import io
import linecache
import os
from collections.abc import Iterator, Mapping
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

from memprof.patching import Patch


def change_files(texts: Mapping[str, str]) -> Iterator[Patch]:
    """Yield patches with which Python runs `texts`, by the real path of a file, as script and as imported modules."""
    open_code, get_code = io.open_code, SourceFileLoader.get_code

    def open_changed_code(path: str) -> Any:
        text = texts.get(os.path.realpath(path))
        return open_code(path) if text is None else io.BytesIO(text.encode())

    def get_changed_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        path = loader.get_filename(name)
        text = texts.get(os.path.realpath(path))
        return get_code(loader, name) if text is None else loader.source_to_code(text.encode(), path)

    yield io, "open_code", open_changed_code  # of runpy
    yield SourceFileLoader, "get_code", get_changed_code


def show_changed_lines(texts: Mapping[str, str]) -> None:
    """Give `linecache`, and so tracebacks and `inspect`, the lines of `texts`, by any name that a file is given."""
    for file, text in texts.items():
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
