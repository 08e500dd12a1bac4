"""The files of a corpus: named one by one, in a folder, or by a pattern; compressed or not."""

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
_COMPRESSED: tuple[tuple[bytes, str, Callable[[IO[bytes]], Any]], ...] = (
    (b"\x1f\x8b", "gzip", lambda raw: gzip.GzipFile(fileobj=raw)),
    (b"BZh", "bzip2", bz2.BZ2File),
    (b"\xfd7zXZ\x00", "xz", lzma.LZMAFile),
)
_SUFFIXES = (".gz", ".bz2", ".xz")
_DAMAGED = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


@dataclass(frozen=True)
class Source:
    """One file of a corpus."""

    path: Path
    named: bool  # by the user, and not found in a folder or by a pattern: what is wrong with it is then an error
    kind: str  # text, JSON Lines or Parquet: by its suffix
    num_bytes: int  # on disk; 0 for a pipe


def find_sources(corpus: str | Path | Sequence[str | Path], column: str | None = None) -> list[Source]:
    """Return the files of `corpus`: files, folders (all in them that is not hidden) and patterns, each file once.

    If a `column` is given, what is no Parquet is JSON Lines, whatever its name. Raises UsageError if one of them is not
    there, or has no file in it.
    """
    names = [corpus] if isinstance(corpus, str | Path) else list(corpus)
    if not names:
        raise UsageError("no corpus was named", hint="give files, a folder or a pattern")
    found: dict[Path, Source] = {}
    for name in names:
        path = Path(name).expanduser()
        named = False
        if path.is_dir():
            paths = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path)))
            if not paths:
                raise UsageError("no file in this folder", value=path, hint="give a folder with text files")
        elif path.exists():
            paths, named = [path], True
        elif glob.has_magic(str(path)):
            paths = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
            if not paths:
                raise UsageError("no file matches this pattern", value=path, hint="quote it, and check the folder")
        else:
            raise UsageError("cannot read the corpus", value=path, hint="no such file or folder")
        for one in paths:
            found.setdefault(one.resolve(), Source(one, named, _kind(one, column), size_of(one)))
    return list(found.values())


def size_of(path: Path) -> int:
    """Return bytes on disk; 0 if it has vanished, as reading it will say."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _kind(path: Path, column: str | None) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _SUFFIXES]
    last = suffixes[-1] if suffixes else ""
    if last == ".parquet":
        return PARQUET
    return JSON_LINES if column is not None or last in _JSON_LINES_SUFFIXES else TEXT


@contextmanager
def opened(path: Path) -> Iterator[tuple[Any, Callable[[], int]]]:
    """Yield a file's bytes, decompressed, and a function for how many were read on disk; UsageError if it fails."""
    try:
        with path.open("rb") as raw:
            head = raw.peek(6)[:6]
            kind, opener = next(((k, o) for magic, k, o in _COMPRESSED if head.startswith(magic)), ("", None))
            seekable = raw.seekable()
            done = 0

            def tell() -> int:
                return raw.tell() if seekable else done

            try:
                yield (raw if opener is None else opener(raw)), tell
            except _DAMAGED as error:
                raise UsageError(
                    f"the {kind} file is truncated or damaged", value=path, hint=str(error) or "write it again"
                ) from None
    except OSError as error:
        raise UsageError("cannot read the corpus", value=path, hint=(error.strerror or str(error)).lower()) from None
