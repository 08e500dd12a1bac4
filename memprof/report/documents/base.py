"""The base of results with tables: conversion to text, HTML, data frames and files."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from memprof.report.frames import RowTable
from memprof.trace.files import FileKind, write_atomically
from memprof.trace.json_values import JsonValue

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.console import RenderableType


_REPORT = FileKind(
    "report",
    "its path",
    lambda begin, end: begin.startswith(b"{") and b'"memprof_version"' in begin,
    "replace it with force=True",
)


class DisplayedDocument(JsonValue):
    """Base of a result with tables; the module of the same name in `report/terminal` renders it as text."""

    __slots__ = ()

    def frames(self) -> dict[str, DataFrame]:
        """Return the tables by name as pandas data frames (docs/data-frames.md); sizes are bytes."""
        return {name: table.to_frame() for name, table in self.tables().items()}

    def tables(self) -> dict[str, RowTable]:
        """Return the tables of the result, by name."""
        raise NotImplementedError

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the document to a JSON file, as `--json` prints it, for `memprof.load` and `memprof show`.

        Args:
            path: path of the file; a report of memprof at this path is replaced.
            force: also replace another file.

        Raises:
            UsageError: another file is at `path`.
            MemprofError: the file cannot be written.
        """
        write_atomically(Path(path), (json.dumps(self.to_json(), indent=1) + "\n").encode(), _REPORT, force=force)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {str(self).partition(chr(10))[0]}>"

    def __str__(self) -> str:
        from memprof.report.terminal.console import to_text

        return to_text(self._build_view())

    def _repr_html_(self) -> str:
        """Return the document as HTML for a notebook: the text of the terminal with colours."""
        from memprof.report.terminal.console import to_html

        return to_html(self._build_view())

    def _build_view(self) -> RenderableType:
        module = importlib.import_module(type(self).__module__.replace(".documents.", ".terminal."))
        view: RenderableType = module.render(self)
        return view
