"""Reading of text files in chunks of bounded size that end between words or lines."""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from memprof.errors import UsageError
from memprof.flows.vocabulary.sources import open_source
from memprof.flows.vocabulary.tally import COUNTING_ERROR_HANDLER, Tally, UndecodableCounter

BLOCK_BYTES = 1 << 15  # small, so that the words of a block are counted while in the processor's cache
BATCH_BYTES = 1 << 20  # of a piece of lines, enough for a tokenizer to use all cores
# Longer text without white space is no word: a binary file, or a language without spaces.
MAX_WORD_CHARACTERS = 1 << 24
MAX_UNDECODABLE = 0.01  # share of undecodable bytes above which the encoding is wrong

Progress = Callable[[int], None]
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip


class NoTextError(UsageError):
    """An empty or binary file: an error if the user named the file, which is else skipped."""


def blocks(path: Path, progress: Progress, tally: Tally, size: int = BATCH_BYTES) -> Iterator[bytes]:
    """Yield the bytes of a file, decompressed, `size` at a time; `progress` is called with the bytes read from disk.
    Raises UsageError: the file cannot be read; NoTextError: the file is empty."""
    done = 0
    with open_source(path) as (file, tell):
        while block := file.read(size):
            done += len(block)
            tally.num_bytes += len(block)
            yield block
            progress(tell() or done)
    if not done:
        raise NoTextError("the corpus is empty", value=path, hint="give files with text")


def pieces(path: Path, encoding: str, progress: Progress, tally: Tally, *, lines: bool = False) -> Iterator[str]:
    """Yield the text of a file in pieces of about `BLOCK_BYTES`, each of which ends after white space.

    A byte order mark of UTF-8 is dropped; bytes invalid in `encoding` are read as U+FFFD and counted in `tally`.
    With `lines`, pieces of about `BATCH_BYTES` end after a line feed if they have one.

    Raises:
        UsageError: the file cannot be read, has a word above `MAX_WORD_CHARACTERS`, or a share of undecodable bytes
            above `MAX_UNDECODABLE`.
        NoTextError: the file is empty or binary.
    """
    decoder = codecs.getincrementaldecoder(find_codec(encoding))(errors=COUNTING_ERROR_HANDLER)
    undecodable = UndecodableCounter(tally, path)
    rest: list[str] = []
    rest_characters = offset = 0
    for block in blocks(path, progress, tally, BATCH_BYTES if lines else BLOCK_BYTES):
        if not offset:
            check_is_text(path, block, encoding)
        text = _decode(decoder, block, offset, undecodable, path, encoding)
        offset += len(block)
        if undecodable.count > MAX_UNDECODABLE * offset and offset >= BATCH_BYTES:
            raise make_encoding_error(path, encoding, undecodable, offset)
        end = (text.rfind("\n") + 1 if lines else 0) or _find_last_word(text)
        if not end:
            rest.append(text)
            rest_characters += len(text)
            if rest_characters > MAX_WORD_CHARACTERS:
                raise UsageError(
                    f"a word of more than {MAX_WORD_CHARACTERS >> 20} Mi characters", value=path,
                    hint="is it text? `--tokenizer bytes` counts any file",
                )  # fmt: skip
            continue
        yield "".join((*rest, text[:end]))
        rest, rest_characters = [text[end:]], len(text) - end
    rest.append(_decode(decoder, b"", offset, undecodable, path, encoding))
    if undecodable.count > MAX_UNDECODABLE * offset:
        raise make_encoding_error(path, encoding, undecodable, offset)
    if last := "".join(rest):
        yield last


def _decode(
    decoder: codecs.IncrementalDecoder,
    block: bytes,
    offset: int,
    undecodable: UndecodableCounter,
    path: Path,
    encoding: str,
) -> str:
    """Return the decoded text of `block`; an empty block ends the file."""
    with undecodable:
        undecodable.block_offset = offset - len(decoder.getstate()[0])
        try:
            return decoder.decode(block, final=not block)
        except UnicodeError as error:  # no error handler is called for UTF-16 without a byte order mark
            raise make_decoding_error(path, encoding, error) from None


def make_decoding_error(path: Path, encoding: str, error: UnicodeError) -> UsageError:
    """Return the error for a file that cannot be decoded."""
    hint = "name its encoding, such as --encoding utf-16-le"
    return UsageError(f"the corpus is not {encoding}", value=f"{path}: {error}", hint=hint)


def find_codec(encoding: str) -> str:
    """Return the codec of `encoding` (UTF-8: the codec that drops byte order marks); UsageError if not of text."""
    try:
        with contextlib.suppress(UnicodeError):
            b"x".decode(encoding)  # raises LookupError for codecs that are no text encoding, such as hex
        codecs.getincrementaldecoder(encoding)
    except (LookupError, ValueError):
        raise UsageError("unknown encoding", value=repr(encoding), hint="such as utf-8, latin-1 or utf-16") from None
    return "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding


def check_is_text(path: Path, head: bytes, encoding: str) -> None:
    """Raise NoTextError if a file that begins with `head` is binary: text has no NUL."""
    if b"\0" not in head or codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")):
        return
    other = next((name for mark, name in _BYTE_ORDER_MARKS.items() if head.startswith(mark)), None)
    hint = f"its byte order mark says --encoding {other}" if other else "`--tokenizer bytes` counts any file"
    raise NoTextError("the corpus is binary", value=f"{path}, NUL at byte {head.index(0):,}", hint=hint)


def make_encoding_error(path: Path, encoding: str, undecodable: UndecodableCounter, num_bytes: int) -> UsageError:
    """Return the error for a file with too many undecodable bytes."""
    return UsageError(
        f"the corpus is not {encoding}",
        value=f"{path}: {undecodable.count:,} of {num_bytes:,} bytes, the first {undecodable.first}",
        hint="name its encoding, such as --encoding latin-1; `--tokenizer bytes` counts any file",
    )


def _find_last_word(text: str) -> int:
    """Return the index of the last word, which may continue in the next block; 0 without white space."""
    # The text up to its last word, including the white space in front of the word.
    if not text or text[-1].isspace():
        return len(text)
    parts = text.rsplit(None, 1)
    return len(text) - len(parts[-1]) if len(parts) == 2 or text[0].isspace() else 0
