"""A counter of words in bounded memory, which spills words beyond its limit to sorted files."""

from __future__ import annotations

import heapq
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

MAX_WORDS = 1 << 20  # different words in memory at a time: about 200 bytes each, with the string and its entry
MAX_SPILL_FILES = 64  # files on disk; more are merged into one, since all are open while items are read


class SpillingCounter:
    """Exact counts of words, with at most `max_words` words in memory; a context manager that removes its files."""

    def __init__(self, max_words: int = MAX_WORDS) -> None:
        self._counts: Counter[str] = Counter()
        self._max_words = max_words
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._spill_files: list[Path] = []
        self._num_written = 0

    def __enter__(self) -> SpillingCounter:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def update(self, words: Iterable[str]) -> None:
        """Count `words`, which have no line feeds; they are held in memory beyond the limit during the call."""
        self._counts.update(words)
        if len(self._counts) > self._max_words:
            self._spill()

    def items(self) -> Iterator[tuple[str, int]]:
        """Yield each word once with its count; sorted by word once something was spilled."""
        if not self._spill_files:
            return iter(self._counts.items())
        return _merge([*map(_read_items, self._spill_files), iter(sorted(self._counts.items()))])

    def most_common(self, count: int) -> list[tuple[str, int]]:
        """Return the `count` most frequent words with counts; equally frequent words are sorted by code point."""
        return heapq.nsmallest(count, self.items(), key=lambda item: (-item[1], item[0]))

    def _spill(self) -> None:
        self._write(iter(sorted(self._counts.items())))
        self._counts.clear()
        if len(self._spill_files) >= MAX_SPILL_FILES:
            old_files, self._spill_files = self._spill_files, []
            self._write(_merge([_read_items(spill_file) for spill_file in old_files]))
            for spill_file in old_files:
                spill_file.unlink()

    def _write(self, items: Iterator[tuple[str, int]]) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="memprof-corpus-")
        spill_file = Path(self._folder.name) / str(self._num_written)
        self._num_written += 1
        with spill_file.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{count} {word}\n" for word, count in items)
        self._spill_files.append(spill_file)


def _read_items(spill_file: Path) -> Iterator[tuple[str, int]]:
    with spill_file.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            count, _, word = line[:-1].partition(" ")
            yield word, int(count)


def _merge(sorted_items: list[Iterator[tuple[str, int]]]) -> Iterator[tuple[str, int]]:
    """Yield the merged items of sorted runs; the counts of equal words are added."""
    for word, group in groupby(heapq.merge(*sorted_items), key=itemgetter(0)):
        yield word, sum(count for _, count in group)
