"""Count the tokens of a corpus: words, bytes, or the ids of a tokenizer."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from memprof.errors import MemprofError, UsageError
from memprof.flows.vocabulary.frequencies import Frequencies
from memprof.flows.vocabulary.rows import read_json_rows, read_parquet_rows
from memprof.flows.vocabulary.sources import JSON_LINES, PARQUET, TEXT, Source, find_sources
from memprof.flows.vocabulary.spilling import MAX_WORDS, SpillingCounter
from memprof.flows.vocabulary.tally import Tally
from memprof.flows.vocabulary.text import NoTextError, Progress, find_codec, read_blocks, read_pieces
from memprof.installer import format_install_command

WORDS, BYTES = "whitespace", "bytes"
TOKENIZER_FILE = "tokenizer.json"
T = TypeVar("T")


@dataclass(frozen=True)
class CorpusCount:
    """Token counts of a corpus, and what is known of its tokenizer."""

    tokenizer: str  # whitespace, bytes, or the path of a tokenizer
    num_bytes: int  # of text: files after decompression, rows as UTF-8
    frequencies: Frequencies
    most_common: tuple[tuple[str, int], ...]  # the most frequent tokens as text, with their counts
    vocab_size: int | None = None  # number of ids of the tokenizer; None for words
    unseen: int | None = None  # number of ids that never occur; None for words
    # Highest id that occurs: a cap that keeps the first ids, as the fix vocabulary-cap does, must be above.
    highest_id: int | None = None
    unseen_ranges: tuple[tuple[int, int], ...] = ()  # first and last of each run of ids that never occur
    special_unseen: tuple[str, ...] = ()  # special tokens that never occur: a model needs them nevertheless
    # Rows of a capped vocabulary besides the kept tokens: one for all rare tokens, and the special tokens.
    reserved: int = 0
    files: int = 1
    rows: int = 0  # of JSON Lines and Parquet that held text
    notes: tuple[str, ...] = ()  # sentences on text that was left out or replaced, and on assumptions


def count_corpus(
    corpus: str | Path | Sequence[str | Path],
    tokenizer: str = WORDS,
    *,
    encoding: str = "utf-8",
    column: str | None = None,
    show: int = 10,
    max_words: int = MAX_WORDS,
    progress: Progress = lambda done: None,
) -> CorpusCount:
    """Count the tokens of a corpus in bounded memory.

    Args:
        corpus: files, folders or patterns: text, JSON Lines or Parquet, by suffix. Text and JSON Lines may be
            compressed by gzip, bzip2 or xz.
        tokenizer: whitespace, bytes, a tokenizer.json, or its folder. A tokenizer encodes text line by line, rows as
            a whole, and adds no special tokens.
        encoding: of text and JSON Lines.
        column: of JSON Lines and Parquet; None: `rows.DEFAULT_COLUMN`. If given, text files are read as JSON Lines.
        show: number of most frequent tokens to return.
        max_words: different words in memory at a time; further words are spilled to disk.
        progress: called with the number of bytes read from disk.

    Raises:
        UsageError: a file or the tokenizer cannot be read, or a file is not in that encoding.
        MemprofError: the disk for spilled words is full.
    """
    find_codec(encoding)
    sources = find_sources(corpus, column)
    reader = _CorpusReader(sources, encoding, column, progress)
    if tokenizer == WORDS:
        with SpillingCounter(max_words) as words:
            try:
                for text in reader.texts():
                    words.update(text.split())
                frequencies = Frequencies.of(count for _, count in words.items())
                most_frequent = tuple(words.most_common(show))
            except OSError as error:
                raise MemprofError(
                    "words that wait on disk could not be kept", value=error.filename,
                    hint=f"{(error.strerror or str(error)).lower()}: set TMPDIR to a folder with more room",
                ) from None  # fmt: skip
        tally = reader.finish()
        return CorpusCount(
            tokenizer, tally.num_bytes, frequencies, most_frequent, reserved=1, files=tally.files, rows=tally.rows,
            notes=tuple(tally.notes()),
        )  # fmt: skip
    if tokenizer == BYTES:
        counts = array("Q", bytes(8 * 256))
        for block in reader.blocks():
            for byte in set(block):
                counts[byte] += block.count(byte)
        return _count_ids(tokenizer, reader.finish(), counts, lambda byte: repr(bytes((byte,)))[1:], show)
    encoder = _load_tokenizer(tokenizer)
    counts = array("Q", bytes(8 * encoder.get_vocab_size(with_added_tokens=True)))
    for documents in reader.documents():
        ids: Counter[int] = Counter()
        for encoded in encoder.encode_batch_fast(documents, add_special_tokens=False):
            ids.update(encoded.ids)
        for token_id, count in ids.items():
            if token_id >= len(counts):  # added tokens may leave gaps between ids
                counts.extend([0] * (token_id + 1 - len(counts)))
            counts[token_id] += count
    special = {token_id: str(t.content) for token_id, t in encoder.get_added_tokens_decoder().items() if t.special}
    notes = []
    if any(source.kind == TEXT for source in sources):
        notes.append(
            "Lines go to the tokenizer one by one without their ends: the tokens of line ends are not counted."
        )
    notes.append(
        "A cap keeps the most frequent ids, which are to be numbered anew; the others become the unknown token."
    )
    return _count_ids(tokenizer, reader.finish(), counts, lambda i: str(encoder.id_to_token(i)), show, special, notes)


class _CorpusReader:
    """Reader of all files of a corpus, one after another, with a tally."""

    def __init__(self, sources: Sequence[Source], encoding: str, column: str | None, progress: Progress) -> None:
        self._sources, self._encoding, self._column, self._progress = sources, encoding, column, progress
        self._bytes_before = 0
        self._tally = Tally()

    def _report(self, num_bytes: int) -> None:
        self._progress(self._bytes_before + num_bytes)

    def _read_rows(self, source: Source) -> Iterator[list[str]]:
        if source.kind == PARQUET:
            return read_parquet_rows(source.path, self._column, self._tally, self._report)
        return read_json_rows(source.path, self._column, self._encoding, self._tally, self._report)

    def _read(self, read_text: Callable[[Path], Iterator[T]], convert_rows: Callable[[list[str]], T]) -> Iterator[T]:
        """Yield the text of all files; empty and binary files are skipped and tallied, unless the user named them."""
        for source in self._sources:
            if not source.named and not source.path.exists():
                self._tally.skipped[source.path] = "vanished before it was read"
                continue
            try:
                yield from read_text(source.path) if source.kind == TEXT else map(convert_rows, self._read_rows(source))
                self._tally.files += 1
            except NoTextError as error:
                is_empty = "empty" in error.problem
                if source.named and (not is_empty or len(self._sources) == 1):
                    raise
                self._tally.skipped[source.path] = "empty" if is_empty else "binary"
            self._bytes_before += source.num_bytes

    def _read_pieces(self, path: Path, *, lines: bool = False) -> Iterator[str]:
        return read_pieces(path, self._encoding, self._report, self._tally, lines=lines)

    def texts(self) -> Iterator[str]:
        """Yield the text of the corpus in pieces, none of which ends inside a word."""
        return self._read(self._read_pieces, "\n".join)

    def documents(self) -> Iterator[list[str]]:
        """Yield the corpus as lists of lines (text files) or of rows (JSON Lines, Parquet)."""
        return self._read(lambda path: map(str.splitlines, self._read_pieces(path, lines=True)), lambda rows: rows)

    def blocks(self) -> Iterator[bytes]:
        """Yield the corpus as bytes; rows of JSON Lines and Parquet are encoded in UTF-8."""
        return self._read(
            lambda path: read_blocks(path, self._report, self._tally), lambda rows: "".join(rows).encode()
        )

    def finish(self) -> Tally:
        """Return the tally of the corpus after all files are read; raise UsageError if no file had text."""
        if not self._tally.files:
            reasons = sorted(set(self._tally.skipped.values()))
            raise UsageError(
                "the corpus is empty", value=f"{len(self._sources):,} files: {', '.join(reasons)}",
                hint="give files with text",
            )  # fmt: skip
        if JSON_LINES in (source.kind for source in self._sources) and not self._tally.num_bytes:
            raise UsageError("the corpus is empty", value="rows without a character", hint="give files with text")
        return self._tally


def _count_ids(
    tokenizer: str,
    tally: Tally,
    counts: array[int],
    format_id: Callable[[int], str],
    show: int,
    special_tokens: dict[int, str] | None = None,
    notes: Sequence[str] = (),
) -> CorpusCount:
    top_ids = sorted(range(len(counts)), key=lambda token_id: (-counts[token_id], token_id))[:show]
    ranges = []
    for occurs, ids in groupby(range(len(counts)), key=lambda token_id: counts[token_id] > 0):
        if not occurs:
            id_run = list(ids)
            ranges.append((id_run[0], id_run[-1]))
    unseen_special = tuple(text for token_id, text in sorted((special_tokens or {}).items()) if not counts[token_id])
    return CorpusCount(
        tokenizer=tokenizer,
        num_bytes=tally.num_bytes,
        frequencies=Frequencies.of(counts),
        most_common=tuple((format_id(token_id), counts[token_id]) for token_id in top_ids if counts[token_id]),
        vocab_size=len(counts),
        unseen=counts.count(0),
        highest_id=max((token_id for token_id, count in enumerate(counts) if count), default=None),
        unseen_ranges=tuple(ranges),
        special_unseen=unseen_special,
        reserved=0 if tokenizer == BYTES else max(1, len(unseen_special)),
        files=tally.files,
        rows=tally.rows,
        notes=(*tally.notes(), *notes),
    )


def _load_tokenizer(name: str) -> Any:
    path = Path(name).expanduser()
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise UsageError(
            "no tokenizer here", value=name, hint=f"{WORDS}, {BYTES}, a {TOKENIZER_FILE}, or a folder that has one"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError:
        hint = f"{format_install_command('tokenizers')}, or count by {WORDS}"
        raise UsageError("the package tokenizers is not installed", value=name, hint=hint) from None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more precise
        raise UsageError("not a tokenizer", value=file, hint=str(error).splitlines()[0]) from None
