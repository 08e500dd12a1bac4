"""A ceiling for the memory that reading files may take, which `--max-memory` moves and the system keeps.

A small file can ask for any amount. Readers look at its size before they begin; what they did not foresee ends here.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

from memprof.device.host import available_bytes
from memprof.errors import UsageError
from memprof.units import GIB, format_bytes, spell_size

LEAST_BYTES = 2 * GIB  # what files of any size may take
MEMORY_PER_BYTE = 12  # of a snapshot that is read and analysed, at most: measured by tests/benchmarks/analyze.py
# The same, where events are read as columns (trace/pickled_events.py), as in nearly all files of torch; 3 measured.
REGULAR_PER_BYTE = 4
_MEMORY_PER_PACKED_BYTE = 400  # the same of a capture, which is packed; a run of 150 steps took 280
_UNLIMITED = 1 << 62
_GZIP = b"\x1f\x8b"

_ceiling_bytes: int | None = None


def ceiling_bytes(*files: Path) -> int:
    """Return what reading these files may take: the ceiling in force, else by their size; at most what is available."""
    if _ceiling_bytes is not None:
        return _ceiling_bytes
    most, available = max(LEAST_BYTES, sum(map(_usual_bytes, files))), available_bytes()
    return most if available is None else min(most, available)


def allow_more(needed_bytes: int) -> str:
    """Return what to do about a file that needs so much."""
    whole_gib = -(-needed_bytes // GIB) * GIB
    return f"if you trust it, let it take more: --max-memory {spell_size(whole_gib)}"


@contextlib.contextmanager
def limit_memory(given_bytes: int | None, files: Sequence[Path] = ()) -> Iterator[None]:
    """Give this process no more memory than the ceiling, beside what it has (on Linux); UsageError beyond it."""
    global _ceiling_bytes
    most = ceiling_bytes(*files) if given_bytes is None else given_bytes
    before, _ceiling_bytes = _ceiling_bytes, most
    try:
        with _limit_memory(most):
            yield
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        # Not `from` it: its frames hold what filled the memory.
        raise UsageError(
            "reading this takes more memory than it may",
            value=f"{', '.join(map(str, files)) or 'standard input'} (over {format_bytes(most)})",
            hint=allow_more(2 * most),
        ) from None
    finally:
        _ceiling_bytes = before


def _usual_bytes(file: Path) -> int:
    try:
        if not file.is_file():  # opening a pipe would take from it
            return 0
        with file.open("rb") as opened:
            per_byte = _MEMORY_PER_PACKED_BYTE if opened.read(2) == _GZIP else MEMORY_PER_BYTE
        return file.stat().st_size * per_byte
    except (OSError, ValueError):
        return 0  # whoever reads it says why it cannot be read


@contextlib.contextmanager
def _limit_memory(most_bytes: int) -> Iterator[None]:
    """Have the system refuse more than `most_bytes` of further memory, where there is /proc."""
    try:
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_DATA)
        known = [limit for limit in before if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min([used + most_bytes, _UNLIMITED, *known]), before[1]))
    except (ImportError, OSError, ValueError, IndexError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
