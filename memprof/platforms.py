"""Support of operating systems: running a program needs what Windows lacks."""

from __future__ import annotations

import mmap

from memprof.errors import MemprofError

_HINT = (
    "install memprof in WSL, where it works as on Linux; here work estimate, recommend --engine, doctor, show, "
    "compare, analyze and export"
)


def require_posix(what: str) -> None:
    """Raise MemprofError on Windows: `what` needs private mappings of memory, fork and signals, which it lacks."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        raise MemprofError(f"Windows is not supported for {what}", value="no private mappings of memory", hint=_HINT)
