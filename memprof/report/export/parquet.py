"""Export of a document's table as a Parquet file."""

from __future__ import annotations

from pathlib import Path

from memprof.fixes.catalog import check_package
from memprof.report.documents.base import DisplayedDocument
from memprof.report.export.parquet_kind import PARQUET
from memprof.trace.files import write_atomically


def write_parquet(document: DisplayedDocument, table: str, path: Path, *, force: bool = False) -> None:
    """Write one table of `document` to a Parquet file, whole or not at all.

    Raises:
        UsageError: pyarrow is not installed; `path` is a file that is no such table, and `force` is False.
        MemprofError: the file cannot be written.
    """
    check_package("--parquet", "pyarrow")
    write_atomically(path, document.frames()[table].to_parquet(index=False), PARQUET, force=force)
