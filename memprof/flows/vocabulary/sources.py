"""The files of a corpus, named singly, by folder or by pattern, and their decompression."""

from __future__ import annotations

import bz2
import glob
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from memprof.errors import UsageError

TEXT, JSON_LINES, PARQUET = "text", "JSON Lines", "Parquet"
_JSON_LINES_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")
_COMPRESSIONS: tuple[tuple[bytes, str, Callable[[IO[bytes]], Any]], ...] = (
    (b"\x1f\x8b", "gzip", lambda raw: gzip.GzipFile(fileobj=raw)),
    (b"BZh", "bzip2", bz2.BZ2File),
    (b"\xfd7zXZ\x00", "xz", lzma.LZMAFile),
)
_COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz")
_DAMAGE_ERRORS = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


@dataclass(frozen=True)
class Source:
    """One file of a corpus."""

    path: Path
    named: bool  # by the user, not found in a folder or by a pattern: defects are then errors
    kind: str  # text, JSON Lines or Parquet, by the suffix
    num_bytes: int  # on disk; 0 for a pipe


def find_sources(corpus: str | Path | Sequence[str | Path], column: str | None = None) -> list[Source]:
    """Return the files of `corpus`, each once: files, files in folders (except hidden ones) and matches of patterns.

    With a `column`, all files but Parquet are read as JSON Lines. Raises UsageError if a name of `corpus` does not
    exist, or has no files.
    """
    names = [corpus] if isinstance(corpus, str | Path) else list(corpus)
    if not names:
        raise UsageError("no corpus was named", hint="give files, a folder or a pattern")
    found: dict[Path, Source] = {}
    for name in names:
        path = Path(name).expanduser()
        is_named = False
        if path.is_dir():
            paths = sorted(p for p in path.rglob("*") if p.is_file() and not _is_hidden(p.relative_to(path)))
            if not paths:
                raise UsageError("no file in this folder", value=path, hint="give a folder with text files")
        elif path.exists():
            paths, is_named = [path], True
        elif glob.has_magic(str(path)):
            paths = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
            if not paths:
                raise UsageError("no file matches this pattern", value=path, hint="quote it, and check the folder")
        else:
            raise UsageError("cannot read the corpus", value=path, hint="no such file or folder")
        for file in paths:
            found.setdefault(file.resolve(), Source(file, is_named, _find_kind(file, column), get_file_size(file)))
    return list(found.values())


def get_file_size(path: Path) -> int:
    """Return the size of a file in bytes; 0 if the file has vanished (reading it raises the error)."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _find_kind(path: Path, column: str | None) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _COMPRESSED_SUFFIXES]
    last = suffixes[-1] if suffixes else ""
    if last == ".parquet":
        return PARQUET
    return JSON_LINES if column is not None or last in _JSON_LINES_SUFFIXES else TEXT


@contextmanager
def open_source(path: Path) -> Iterator[tuple[Any, Callable[[], int]]]:
    """Context manager: decompressed file and function for the bytes read from disk; UsageError if reading fails."""
    try:
        with path.open("rb") as raw:
            head = raw.peek(6)[:6]
            kind, decompress = next(((k, o) for magic, k, o in _COMPRESSIONS if head.startswith(magic)), ("", None))
            seekable = raw.seekable()
            num_read = 0

            def tell() -> int:
                return raw.tell() if seekable else num_read

            try:
                yield (raw if decompress is None else decompress(raw)), tell
            except _DAMAGE_ERRORS as error:
                raise UsageError(
                    f"the {kind} file is truncated or damaged", value=path, hint=str(error) or "write it again"
                ) from None
    except OSError as error:
        raise UsageError("cannot read the corpus", value=path, hint=(error.strerror or str(error)).lower()) from None
