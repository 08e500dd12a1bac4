"""Statistics of reading a corpus: the amount of text, and for each kind of defect its count and first location."""

from __future__ import annotations

import codecs
import threading
from dataclasses import dataclass, field
from pathlib import Path

COUNTING_ERROR_HANDLER = "memprof-undecodable"  # name of the codecs' error handler that counts instead of raising
MAX_NAMED = 3  # files named in a sentence


@dataclass
class Defect:
    """Defects of one kind in one file."""

    count: int
    first: str  # place and description of the first defect


@dataclass
class Tally:
    """Counts of text and defects, updated while a corpus is read."""

    num_bytes: int = 0  # of text, after decompression
    files: int = 0  # that were read
    rows: int = 0  # of JSON Lines and Parquet that held text
    # Bytes that are invalid in the encoding; each is read as U+FFFD.
    undecodable: dict[Path, Defect] = field(default_factory=dict)
    bad_rows: dict[Path, Defect] = field(default_factory=dict)  # rows without text in the column, or that are no JSON
    # Files found in a folder or by a pattern that hold no text, and why.
    skipped: dict[Path, str] = field(default_factory=dict)

    def count_bad_row(self, path: Path, first: str) -> None:
        """Count a row without text; `first` describes the row."""
        _add_defects(self.bad_rows, path, 1, first)

    def notes(self) -> list[str]:
        """Return a sentence on each defect and on the skipped files."""
        found = []
        for path, defect in self.undecodable.items():
            bytes_are = "byte is" if defect.count == 1 else "bytes are"
            found.append(
                f"{path}: {defect.count:,} {bytes_are} undecodable and read as U+FFFD; the first {defect.first}."
            )
        for path, defect in self.bad_rows.items():
            rows = "row" if defect.count == 1 else "rows"
            found.append(f"{path}: {defect.count:,} {rows} left out; the first {defect.first}.")
        by_reason: dict[str, list[Path]] = {}
        for path, why in self.skipped.items():
            by_reason.setdefault(why, []).append(path)
        for why, paths in by_reason.items():
            names = ", ".join(str(path) for path in paths[:MAX_NAMED])
            more = f" and {len(paths) - MAX_NAMED:,} more" if len(paths) > MAX_NAMED else ""
            found.append(f"Left out, {why}: {names}{more}.")
        return found


class UndecodableCounter:
    """Context manager: counts undecodable bytes while a file is decoded with errors=COUNTING_ERROR_HANDLER."""

    def __init__(self, tally: Tally, path: Path) -> None:
        self._tally, self._path = tally, path
        self.block_offset: int | None = None  # offset in the file of the decoded block, if known

    def __enter__(self) -> UndecodableCounter:
        _active_counter.counter = self
        return self

    def __exit__(self, *exc: object) -> None:
        _active_counter.counter = None

    @property
    def count(self) -> int:
        """Return the number of undecodable bytes so far."""
        defect = self._tally.undecodable.get(self._path)
        return defect.count if defect else 0

    @property
    def first(self) -> str:
        """Return the description of the first undecodable bytes."""
        return self._tally.undecodable[self._path].first

    def count_error(self, error: UnicodeDecodeError) -> None:
        """Count the bytes of one error."""
        what = " ".join(f"0x{byte:02x}" for byte in error.object[error.start : error.end][:4])
        where = "" if self.block_offset is None else f" near byte {self.block_offset + error.start:,}"
        _add_defects(self._tally.undecodable, self._path, error.end - error.start, f"is {what}{where}: {error.reason}")


def _add_defects(defects: dict[Path, Defect], path: Path, count: int, first: str) -> None:
    defect = defects.setdefault(path, Defect(0, first))
    defect.count += count


_active_counter = threading.local()


def _replace_undecodable(error: UnicodeError) -> tuple[str, int]:
    counter: UndecodableCounter | None = getattr(_active_counter, "counter", None)
    if counter is None or not isinstance(error, UnicodeDecodeError):
        raise error
    counter.count_error(error)
    return "\ufffd", error.end


codecs.register_error(COUNTING_ERROR_HANDLER, _replace_undecodable)
