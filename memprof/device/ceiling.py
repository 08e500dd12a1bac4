"""Limit on the memory that memprof may use to read files (`--max-memory`), enforced by the operating system.

A small file can make a reader allocate any amount. Readers check file sizes first; the limit stops the remaining cases.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

from memprof.device.host import available_bytes
from memprof.errors import UsageError
from memprof.units import GIB, format_bytes, spell_size

MIN_LIMIT_BYTES = 2 * GIB  # limit for small files
MEMORY_BYTES_PER_FILE_BYTE = 12  # maximum for reading and analysing a snapshot: measured by tests/benchmarks/analyze.py
# Maximum where events are read as columns (trace/pickled_events.py), as in nearly all files of torch; 3 measured.
MEMORY_BYTES_PER_COLUMN_FILE_BYTE = 4
_MEMORY_PER_PACKED_BYTE = 400  # maximum for a compressed capture; a run of 150 steps took 280
_UNLIMITED = 1 << 62
_GZIP = b"\x1f\x8b"

_current_limit: int | None = None


def compute_limit_bytes(*files: Path) -> int:
    """Return the limit in bytes for reading files: the limit in force, else by size; at most available memory."""
    if _current_limit is not None:
        return _current_limit
    limit, available = max(MIN_LIMIT_BYTES, sum(map(_estimate_bytes, files))), available_bytes()
    return limit if available is None else min(limit, available)


def suggest_limit(needed_bytes: int) -> str:
    """Return the hint for a file that needs `needed_bytes`."""
    rounded_bytes = -(-needed_bytes // GIB) * GIB
    return f"if you trust it, let it take more: --max-memory {spell_size(rounded_bytes)}"


@contextlib.contextmanager
def limit_memory(given_bytes: int | None, files: Sequence[Path] = ()) -> Iterator[None]:
    """Context manager: limit this process's additional memory (on Linux); raises UsageError where the body exceeds the
    limit."""
    global _current_limit
    limit = compute_limit_bytes(*files) if given_bytes is None else given_bytes
    before, _current_limit = _current_limit, limit
    try:
        with _limit_process_memory(limit):
            yield
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        # Not `from error`: the error's frames keep the objects that filled the memory.
        raise UsageError(
            "reading this takes more memory than it may",
            value=f"{', '.join(map(str, files)) or 'standard input'} (over {format_bytes(limit)})",
            hint=suggest_limit(2 * limit),
        ) from None
    finally:
        _current_limit = before


def _estimate_bytes(file: Path) -> int:
    try:
        if not file.is_file():  # opening a pipe would consume its data
            return 0
        with file.open("rb") as opened:
            per_byte = _MEMORY_PER_PACKED_BYTE if opened.read(2) == _GZIP else MEMORY_BYTES_PER_FILE_BYTE
        return file.stat().st_size * per_byte
    except (OSError, ValueError):
        return 0  # the reader reports the error


@contextlib.contextmanager
def _limit_process_memory(max_bytes: int) -> Iterator[None]:
    """Context manager: let the system refuse more than `most_bytes` of additional memory, where there is /proc."""
    try:
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_DATA)
        known = [limit for limit in before if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min([used + max_bytes, _UNLIMITED, *known]), before[1]))
    except (ImportError, OSError, ValueError, IndexError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
