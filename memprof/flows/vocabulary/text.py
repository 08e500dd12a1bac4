"""A text file in pieces of bounded size that end where a word or a line does."""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from memprof.errors import UsageError
from memprof.flows.vocabulary.sources import opened
from memprof.flows.vocabulary.tally import ERRORS, Tally, Undecodable

BLOCK_BYTES = 1 << 15  # so small that the words of a block are still in the processor's cache when they are counted
BATCH_BYTES = 1 << 20  # of a piece of lines: enough for a tokenizer to use all cores
# What is longer without white space is no word: a binary file, or a language that is written without spaces.
MAX_WORD_CHARACTERS = 1 << 24
MAX_UNDECODABLE = 0.01  # a file with more bytes than this share that are not in the encoding is in another one

Progress = Callable[[int], None]
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip


class NoTextError(UsageError):
    """The file is empty or binary: an error if the user named it, else a file that is left out."""


def blocks(path: Path, progress: Progress, tally: Tally, size: int = BATCH_BYTES) -> Iterator[bytes]:
    """Yield the bytes of a file, decompressed, `size` at a time; `progress` is told how many have been read on disk.
    Raises UsageError: it cannot be read; NoTextError: nothing is in it."""
    done = 0
    with opened(path) as (file, tell):
        while block := file.read(size):
            done += len(block)
            tally.num_bytes += len(block)
            yield block
            progress(tell() or done)
    if not done:
        raise NoTextError("the corpus is empty", value=path, hint="give files with text")


def pieces(path: Path, encoding: str, progress: Progress, tally: Tally, *, lines: bool = False) -> Iterator[str]:
    """Yield the text of a file in pieces of about `BLOCK_BYTES`, each of which ends after white space.

    A byte order mark of UTF-8 is left out; bytes that are not in `encoding` are read as U+FFFD and counted in `tally`.
    With `lines`, pieces of about `BATCH_BYTES` end after a line feed instead, where there is one.

    Raises:
        UsageError: the file cannot be read, or has a word without end; or more than `MAX_UNDECODABLE` of it is not in
            that encoding.
        NoTextError: it is empty or binary.
    """
    decoder = codecs.getincrementaldecoder(codec_name(encoding))(errors=ERRORS)
    wrong = Undecodable(tally, path)
    rest: list[str] = []
    waiting = before = 0
    for block in blocks(path, progress, tally, BATCH_BYTES if lines else BLOCK_BYTES):
        if not before:
            check_is_text(path, block, encoding)
        text = _decode(decoder, block, before, wrong, path, encoding)
        before += len(block)
        if wrong.count > MAX_UNDECODABLE * before and before >= BATCH_BYTES:
            raise wrong_encoding(path, encoding, wrong, before)
        end = (text.rfind("\n") + 1 if lines else 0) or _after_last_space(text)
        if not end:
            rest.append(text)
            waiting += len(text)
            if waiting > MAX_WORD_CHARACTERS:
                raise UsageError(
                    f"a word of more than {MAX_WORD_CHARACTERS >> 20} Mi characters", value=path,
                    hint="is it text? `--tokenizer bytes` counts any file",
                )  # fmt: skip
            continue
        yield "".join((*rest, text[:end]))
        rest, waiting = [text[end:]], len(text) - end
    rest.append(_decode(decoder, b"", before, wrong, path, encoding))
    if wrong.count > MAX_UNDECODABLE * before:
        raise wrong_encoding(path, encoding, wrong, before)
    if last := "".join(rest):
        yield last


def _decode(
    decoder: codecs.IncrementalDecoder, block: bytes, before: int, wrong: Undecodable, path: Path, encoding: str
) -> str:
    """Return the text of the next block; an empty one is the end."""
    with wrong:
        wrong.before = before - len(decoder.getstate()[0])
        try:
            return decoder.decode(block, final=not block)
        except UnicodeError as error:  # what no handler is asked about: UTF-16 without a byte order mark
            raise not_in(path, encoding, error) from None


def not_in(path: Path, encoding: str, error: UnicodeError) -> UsageError:
    """Return the error for a file that cannot be decoded at all."""
    hint = "name its encoding, such as --encoding utf-16-le"
    return UsageError(f"the corpus is not {encoding}", value=f"{path}: {error}", hint=hint)


def codec_name(encoding: str) -> str:
    """Return the codec for `encoding`, for UTF-8 the one without byte order mark; UsageError if it is none of text."""
    try:
        with contextlib.suppress(UnicodeError):
            b"x".decode(encoding)  # refuses what is no encoding of text, such as hex
        codecs.getincrementaldecoder(encoding)
    except (LookupError, ValueError):
        raise UsageError("unknown encoding", value=repr(encoding), hint="such as utf-8, latin-1 or utf-16") from None
    return "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding


def check_is_text(path: Path, head: bytes, encoding: str) -> None:
    """Raise NoTextError if a file that begins with `head` is binary: it has a NUL, which no text has."""
    if b"\0" not in head or codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")):
        return
    other = next((name for mark, name in _BYTE_ORDER_MARKS.items() if head.startswith(mark)), None)
    hint = f"its byte order mark says --encoding {other}" if other else "`--tokenizer bytes` counts any file"
    raise NoTextError("the corpus is binary", value=f"{path}, NUL at byte {head.index(0):,}", hint=hint)


def wrong_encoding(path: Path, encoding: str, wrong: Undecodable, num_bytes: int) -> UsageError:
    """Return the error for a file with too many undecodable bytes."""
    return UsageError(
        f"the corpus is not {encoding}",
        value=f"{path}: {wrong.count:,} of {num_bytes:,} bytes, the first {wrong.first}",
        hint="name its encoding, such as --encoding latin-1; `--tokenizer bytes` counts any file",
    )


def _after_last_space(text: str) -> int:
    """Return where the word begins that may go on in the next block; 0 if the text has no white space."""
    # All of the text but its last word: what `rsplit` leaves, with the space behind it.
    if not text or text[-1].isspace():
        return len(text)
    parts = text.rsplit(None, 1)
    return len(text) - len(parts[-1]) if len(parts) == 2 or text[0].isspace() else 0
