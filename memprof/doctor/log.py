"""Search for errors in a log of any length, in one pass over chunks, with the text around each error.

The chunks are searched as bytes, so that the disk limits the speed; memory use is a few megabytes.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import BinaryIO

from memprof.doctor.log_lines import Passage
from memprof.doctor.signatures import SIGNATURES
from memprof.errors import UsageError

_CHUNK_BYTES = 4 << 20
_BYTES_BEFORE = 24 << 10  # Text before an error, with its traceback.
_BYTES_AFTER = 4 << 10  # Text after the beginning of a message.
MAX_PASSAGES = 60  # Passages per anchor: a service that retries repeats its errors.
_HEAD_BYTES = 256 << 10  # Beginning of the log, where programs print their options.
# What inference engines print of a start, which a service that is started again prints later, too (engine_starts.py).
_START_WORDS = re.compile(
    rb"vLLM API server version|non-default args: |engine \(v|odel (?:loading|weights) took|Estimated CUDA graph"
    rb"|KV cache (?:memory: |size: )|concurrency for |Graph capturing finished|memory on device|ServerArgs\("
    rb"|Load weight end|KV Cache is|max_total_num_tokens="
)
_START_ANCHORS = (b"odel loading took", b"KV cache memory: ", b"Load weight end")  # One is in each start.
_MAX_START_LINES = 400
_MAX_START_LINE = 16 << 10

_SNAPSHOT_HINT = "a snapshot of torch is for: memprof analyze FILE"
_MAGIC_BYTES: tuple[tuple[bytes | tuple[bytes, ...], str, str], ...] = (
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
    "CachingHostAllocator", "pin memory thread", "pin_memory", "cudaErrorMemory", "CUDA error 2", "runtime error",
    "RESOURCE_EXH", "esource exhausted", "ResourceExh", "OutOfMemory", "GPU memory", "cache blocks", "KV cache",
    "at least one request", "Not enough ", "batch size found", "CPU or the disk", "to the disk", "CPUAllocator",
    "shared memory", "shm", "unable to open shared", "Bus error", "oom", "OOM", "low on memory", " -9", "137",
    "cuda error", "Failed to CUDA", "Cuda failure", "ncclUnhandled", "find an engine", "fallocate", "buffer size",
    "UR_RESULT", "OOM when", "SIGKILL", "Killed", "memory pressure", "memory usage threshold",
    "on startup is", "maximum allowed length", "more system memory", "buffer of size",
)  # fmt: skip
_WORDS_BY_ANCHOR = {
    anchor.encode(): {word.encode() for signature in SIGNATURES for word in signature.words if anchor in word}
    for anchor in _ANCHORS
}


class LogReader:
    """A reader that searches a log for errors in one pass; error messages call the log `name`."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self.head = ""  # The beginning of the log, complete after `read_passages`.
        self._start_lines: deque[str] = deque(maxlen=_MAX_START_LINES)
        self._num_left = dict.fromkeys(_WORDS_BY_ANCHOR, MAX_PASSAGES)

    def read_passages(self) -> Iterator[Passage]:
        """Yield the passages that may contain errors, in the log's order. Raises UsageError: the log is not text."""
        buffer = b""
        # `buffer[0]` is byte `buffer_start` of the log, after `num_lines_before` line feeds.
        buffer_start, num_lines_before, searched_end = 0, 0, 0
        for chunk in self._read_chunks():
            buffer += chunk
            new = 0
            if len(self.head) < _HEAD_BYTES:
                new = _HEAD_BYTES - len(self.head)
                self.head += chunk[:new].decode(errors="replace")
            self._collect_start_lines(chunk, new)
            # The end of the buffer is searched with the next chunk.
            search_end = len(buffer) - _BYTES_AFTER if chunk else len(buffer)
            for offset in self._find_words(buffer, searched_end - buffer_start, search_end):
                line_start = buffer.rfind(b"\n", 0, offset) + 1
                # A progress bar and the error that follows share a line.
                line_start = max(line_start, buffer.rfind(b"\r", 0, offset) + 1, offset - 2048)
                if buffer_start + line_start < searched_end:
                    continue
                line_end = buffer.find(b"\n", offset)
                line_end = len(buffer) if line_end < 0 else line_end
                searched_end = buffer_start + min(line_end, offset + 2048)
                text_before = buffer[max(0, line_start - _BYTES_BEFORE) : line_start]
                yield Passage(
                    text_before.decode(errors="replace"),
                    buffer[line_start : offset + _BYTES_AFTER].decode(errors="replace"),
                    num_lines_before + buffer.count(b"\n", 0, line_start) + 1,
                )
            searched_end = max(searched_end, buffer_start + max(0, search_end))
            keep_start = max(0, len(buffer) - _BYTES_BEFORE - _BYTES_AFTER)
            num_lines_before += buffer.count(b"\n", 0, keep_start)
            buffer_start += keep_start
            buffer = buffer[keep_start:]

    @property
    def start_text(self) -> str:
        """The beginning of the log and, of what follows, the lines of an engine's start."""
        return self.head + "\n" + "\n".join(self._start_lines)

    def _collect_start_lines(self, chunk: bytes, begin: int) -> None:
        """Keep the lines of `chunk` from `begin` on that an engine prints at its start; one that is cut by the end of a
        chunk is lost."""
        if not any(chunk.find(anchor, begin) >= 0 for anchor in _START_ANCHORS):
            return
        offset = begin
        while (match := _START_WORDS.search(chunk, offset)) is not None:
            line_start = max(chunk.rfind(b"\n", 0, match.start()) + 1, match.start() - _MAX_START_LINE)
            line_end = chunk.find(b"\n", match.end())
            offset = len(chunk) if line_end < 0 else line_end
            line = chunk[line_start : min(offset, match.end() + _MAX_START_LINE)]
            self._start_lines.append(line.decode(errors="replace"))

    def _find_words(self, buffer: bytes, begin: int, end: int) -> list[int]:
        """Return the sorted offsets in `buffer`, from `begin` to `end`, at which an error message may begin."""
        offsets: list[int] = []
        for anchor, num_left in self._num_left.items():
            words = _WORDS_BY_ANCHOR[anchor]
            offset = buffer.find(anchor, begin) if num_left else -1
            while 0 <= offset < end and num_left:
                line_end = buffer.find(b"\n", offset)
                line_end = len(buffer) if line_end < 0 else line_end
                line = buffer[max(buffer.rfind(b"\n", 0, offset) + 1, offset - 2048) : min(line_end, offset + 2048)]
                if any(word in line for word in words):
                    offsets.append(offset)
                    num_left -= 1
                # One match per line suffices.
                offset = buffer.find(anchor, line_end)
            self._num_left[anchor] = num_left
        return sorted(offsets)

    def _read_chunks(self) -> Iterator[bytes]:
        """Yield the log in chunks of UTF-8, then b"". Raises UsageError: the log is not text."""
        first_chunk = self._stream.read(_CHUNK_BYTES)
        for magic, file_type, hint in _MAGIC_BYTES:
            if first_chunk.startswith(magic):
                raise UsageError(f"this is {file_type}, not a log", value=self._name, hint=hint)
        chunks = chain([first_chunk], iter(lambda: self._stream.read(_CHUNK_BYTES), b""))
        if first_chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # what PowerShell's > writes
            yield from (text.encode() for text in codecs.iterdecode(chunks, "utf-16", "replace"))
        else:
            sample = first_chunk[:65536]
            num_controls = sum(sample.count(bytes([i])) for i in range(32) if i not in (7, 8, 9, 10, 11, 12, 13, 27))
            if num_controls > len(sample) // 50 + 2:
                raise UsageError("this is no text", value=self._name, hint="give the text that the program printed")
            yield from chunks
        yield b""
