"""Search for errors in a log of any length, in one pass over chunks, with the text around each error.

The chunks are searched as bytes, so that the disk limits the speed; memory use is a few megabytes.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import BinaryIO

from memprof.doctor.signatures import SIGNATURES
from memprof.errors import UsageError

_CHUNK_BYTES = 4 << 20
_BYTES_BEFORE = 24 << 10  # Text before an error, with its traceback.
_BYTES_AFTER = 4 << 10  # Text after the beginning of a message.
MAX_PASSAGES = 60  # Passages per anchor: a service that retries repeats its errors.
_HEAD_BYTES = 256 << 10  # Beginning of the log, where programs print their options.

_SNAPSHOT_HINT = "a snapshot of torch is for: memprof analyze FILE"
_MAGIC: tuple[tuple[bytes | tuple[bytes, ...], str, str], ...] = (
    (b"\x1f\x8b", "a gzip file", "zcat FILE | memprof doctor"),
    (b"PK\x03\x04", "a zip archive (of torch.save, perhaps)", "give the text that the program printed"),
    (b"\x28\xb5\x2f\xfd", "a zstd file", "zstdcat FILE | memprof doctor"),
    (b"BZh", "a bzip2 file", "bzcat FILE | memprof doctor"),
    (b"\xfd7zXZ", "an xz file", "xzcat FILE | memprof doctor"),
    (b"\x7fELF", "a program", "give the text that it printed"),
    ((b"\x89PNG", b"\xff\xd8\xff"), "a picture", "give the text that is on it"),
    (b"%PDF", "a PDF", "give the text that is in it"),
    ((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), "a pickle", _SNAPSHOT_HINT),
)
# Substrings of the signatures' words, every word having at least one; each costs a pass over the log.
_ANCHORS = (
    "of memory", "of-memory", " allocate", "preemptively", "allowed memory", "same device", "is fragmented",
    "should be the same", "Expected object of ", "xpected device ", "expected it to be", "expected them to be",
    "buffers on device", "indices should be", "CUDA_ERROR_OUT", "device type ", "the expected device", "of meta tensor",
    "Placeholder storage", "_STATUS_", "cudaHostAlloc",
    "CachingHostAllocator", "pin memory thread", "pin_memory", "cudaErrorMemory", "CUDA error 2", "runtime error (2)",
    "RESOURCE_EXH", "esource exhausted", "ResourceExh", "OutOfMemory", "GPU memory util", "cache blocks", "KV cache",
    "at least one request", "Not enough memory", "batch size found", "CPU or the disk", "to the disk", "CPUAllocator",
    "shared memory", "shm", "unable to open shared", "Bus error", "oom", "OOM", "low on memory", " -9", "137",
    "cuda error", "Failed to CUDA", "Cuda failure", "ncclUnhandled", "find an engine", "fallocate", "buffer size",
    "UR_RESULT", "OOM when", "SIGKILL", "Killed", "memory pressure", "memory usage threshold",
)  # fmt: skip
_WORDS_BY_ANCHOR = {
    anchor.encode(): {word.encode() for signature in SIGNATURES for word in signature.words if anchor in word}
    for anchor in _ANCHORS
}


@dataclass(frozen=True, slots=True)
class Passage:
    """The text around a word of a signature: before its line, from its line on, and the line number."""

    before: str
    after: str
    line: int


class LogReader:
    """A reader of a log, which is read once; `name` is for error messages."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self.head = ""  # The beginning of the log, complete after `read_passages`.
        self._left = dict.fromkeys(_WORDS_BY_ANCHOR, MAX_PASSAGES)

    def read_passages(self) -> Iterator[Passage]:
        """Yield the passages that may be errors, in order. Raises UsageError: the log is no text."""
        buffer = b""
        # `buffer[0]` is byte `start` of the log, after `lines_before` line feeds.
        start, lines_before, done = 0, 0, 0
        for piece in self._read_pieces():
            buffer += piece
            if len(self.head) < _HEAD_BYTES:
                self.head += piece[: _HEAD_BYTES - len(self.head)].decode(errors="replace")
            # The end of the buffer is searched with the next chunk.
            limit = len(buffer) - _BYTES_AFTER if piece else len(buffer)
            for at in self._find_words(buffer, done - start, limit):
                line_start = buffer.rfind(b"\n", 0, at) + 1
                # A progress bar and the error that follows share a line.
                line_start = max(line_start, buffer.rfind(b"\r", 0, at) + 1, at - 2048)
                if start + line_start < done:
                    continue
                line_end = buffer.find(b"\n", at)
                line_end = len(buffer) if line_end < 0 else line_end
                done = start + min(line_end, at + 2048)
                before = buffer[max(0, line_start - _BYTES_BEFORE) : line_start]
                yield Passage(
                    before.decode(errors="replace"),
                    buffer[line_start : at + _BYTES_AFTER].decode(errors="replace"),
                    lines_before + buffer.count(b"\n", 0, line_start) + 1,
                )
            done = max(done, start + max(0, limit))
            keep = max(0, len(buffer) - _BYTES_BEFORE - _BYTES_AFTER)
            lines_before += buffer.count(b"\n", 0, keep)
            start += keep
            buffer = buffer[keep:]

    def _find_words(self, buffer: bytes, low: int, high: int) -> list[int]:
        """Return the offsets of the signatures' words between `low` and `high`, in order."""
        found: list[int] = []
        for anchor, left in self._left.items():
            words = _WORDS_BY_ANCHOR[anchor]
            at = buffer.find(anchor, max(0, low)) if left else -1
            while 0 <= at < high and left:
                end = buffer.find(b"\n", at)
                end = len(buffer) if end < 0 else end
                line = buffer[max(buffer.rfind(b"\n", 0, at) + 1, at - 2048) : min(end, at + 2048)]
                if any(word in line for word in words):
                    found.append(at)
                    left -= 1
                # One match per line suffices.
                at = buffer.find(anchor, end)
            self._left[anchor] = left
        return sorted(found)

    def _read_pieces(self) -> Iterator[bytes]:
        """Yield the log in chunks of UTF-8, and b"" at the end."""
        first = self._stream.read(_CHUNK_BYTES)
        for magic, what, hint in _MAGIC:
            if first.startswith(magic):
                raise UsageError(f"this is {what}, not a log", value=self._name, hint=hint)
        pieces = chain([first], iter(lambda: self._stream.read(_CHUNK_BYTES), b""))
        if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # what PowerShell's > writes
            yield from (text.encode() for text in codecs.iterdecode(pieces, "utf-16", "replace"))
        else:
            sample = first[:65536]
            odd = sum(sample.count(bytes([code])) for code in range(32) if code not in (7, 8, 9, 10, 11, 12, 13, 27))
            if odd > len(sample) // 50 + 2:
                raise UsageError("this is no text", value=self._name, hint="give the text that the program printed")
            yield from pieces
        yield b""


_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")
_BOX = re.compile(r"^[\s│|╭╰─╮╯❱>]*[│|╭╰]\s?|\s*[│|╮╯]\s*$|[─━]{3,}")
_PREFIX = re.compile(
    r"^(?:"
    r"\[(?:default\d*|rank ?\d+|\d+)\]: ?"  # torchrun
    r"|\([\w.:]*\s*(?:pid|rank|ip)=[^)]*\) ?"  # Ray, vLLM
    r"|SUBPROCESS: ?|[EWI]\d{4} [\d:.]+ +(?:\d+ +)?\S+:\d+\] ?"
    r"|[\w.-]+\s+\| (?=\S| {2})"  # docker compose
    r"|\[?\d{4}-\d\d-\d\d[T ,_][\d:.,]+(?:[+-]\d\d:?\d\d|Z)?\]?:? ?(?:- )?"
    r"|(?:INFO|ERROR|WARNING|CRITICAL|DEBUG)(?= ):? *(?:\d\d-\d\d [\d:]+ )?(?:\[[\w./]+:\d+\] ?)?"
    r"|\[[\w./]+:\d+\] ?"
    r")"
)


def clean_line(line: str) -> str:
    """Return a line without ANSI colors, carriage returns, and prefixes of launchers and loggers."""
    line = _ANSI.sub("", line.rstrip("\r\n")).rpartition("\r")[2]
    for _ in range(4):
        line = _PREFIX.sub("", line, count=1)
    return line


def strip_box(line: str) -> str:
    """Return a line without the borders of a box, as rich draws them."""
    return _BOX.sub("", line)


def join_lines(text: str, num_lines: int = 14) -> str:
    """Return the first `num_lines` lines of `text` as one cleaned line with single spaces."""
    lines = [strip_box(clean_line(line)).strip() for line in text.split("\n")[:num_lines]]
    return re.sub(r"\s+", " ", " ".join(lines)).strip()
