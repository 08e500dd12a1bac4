"""Export of a document's tables as CSV files: commas, UTF-8, a header line; lists as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.errors import MemprofError, UsageError
from memprof.trace.files import csv_kind, write_atomically

if TYPE_CHECKING:
    from memprof.report.documents.base import DisplayedDocument

CSV_FLAG = "--csv"
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def check_folder(folder: Path) -> None:
    """Raise UsageError if no file can be created in `folder`: it is a file, is below a file, or is not writable."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise UsageError("this is a file, not a folder for tables", value=existing, hint=f"change {CSV_FLAG}")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError("this folder may not be written to", value=existing, hint=f"change {CSV_FLAG}")


def write_csv(document: DisplayedDocument, folder: Path, *, force: bool = False) -> None:
    """Write every table of `document` to `folder`/TABLE.csv, each atomically; create the folder.

    An existing table of the same name is replaced, even by one without rows, so that no table of an earlier run stays;
    other files in the folder are not touched.

    Raises:
        UsageError: `folder` is no folder, or has a file TABLE.csv that is no such table and `force` is False.
        MemprofError: a file cannot be written.
    """
    check_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = f"{error.strerror}: change {CSV_FLAG}"
        raise MemprofError("the folder for tables could not be made", value=folder, hint=hint) from error
    for name, frame in document.frames().items():
        columns = {column: frame[column].map(_format_cell) for column in frame.select_dtypes(["object", "string"])}
        text: str = frame.assign(**columns).to_csv(index=False, lineterminator="\n")
        header = text.partition("\n")[0].encode()
        write_atomically(folder / f"{name}.csv", text.encode(), csv_kind("such table", CSV_FLAG, header), force=force)


def _format_cell(value: Any) -> Any:
    """Return a cell's value for CSV: lists as JSON, strings that look like formulas with an apostrophe before them.

    The characters that begin a formula: https://owasp.org/www-community/attacks/CSV_Injection
    """
    if isinstance(value, list | tuple | dict):
        return json.dumps(value)
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value
