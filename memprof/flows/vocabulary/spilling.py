"""A counter of words that takes bounded memory, whatever it counts: what does not fit waits on disk, sorted."""

from __future__ import annotations

import heapq
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

MAX_WORDS = 1 << 20  # different words in memory at a time: about 200 bytes each, with the string and its entry
MAX_RUNS = 64  # files on disk; more are merged into one, for each is open while they are read


class SpillingCounter:
    """Exact counts of words, `max_words` different ones in memory; a context manager, which removes its files."""

    def __init__(self, max_words: int = MAX_WORDS) -> None:
        self._counts: Counter[str] = Counter()
        self._max_words = max_words
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._runs: list[Path] = []
        self._made = 0

    def __enter__(self) -> SpillingCounter:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def update(self, words: Iterable[str]) -> None:
        """Count words, none of which may hold a line feed. What one call brings is held in memory beside the limit."""
        self._counts.update(words)
        if len(self._counts) > self._max_words:
            self._spill()

    def items(self) -> Iterator[tuple[str, int]]:
        """Yield each word once with its count; sorted by word once something was spilled."""
        if not self._runs:
            return iter(self._counts.items())
        return _summed([*map(_read, self._runs), iter(sorted(self._counts.items()))])

    def most_common(self, count: int) -> list[tuple[str, int]]:
        """Return the `count` most frequent words; of equally frequent ones, the first by code point."""
        return heapq.nsmallest(count, self.items(), key=lambda item: (-item[1], item[0]))

    def _spill(self) -> None:
        self._write(iter(sorted(self._counts.items())))
        self._counts.clear()
        if len(self._runs) >= MAX_RUNS:
            merged, self._runs = self._runs, []
            self._write(_summed([_read(run) for run in merged]))
            for run in merged:
                run.unlink()

    def _write(self, items: Iterator[tuple[str, int]]) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="memprof-corpus-")
        run = Path(self._folder.name) / str(self._made)
        self._made += 1
        with run.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{count} {word}\n" for word, count in items)
        self._runs.append(run)


def _read(run: Path) -> Iterator[tuple[str, int]]:
    with run.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            count, _, word = line[:-1].partition(" ")
            yield word, int(count)


def _summed(runs: list[Iterator[tuple[str, int]]]) -> Iterator[tuple[str, int]]:
    """Merge sorted runs, equal words added."""
    for word, group in groupby(heapq.merge(*runs), key=itemgetter(0)):
        yield word, sum(count for _, count in group)
