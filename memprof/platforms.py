"""What the operating system has to offer for programs to be run on the virtual GPU."""

from __future__ import annotations

import mmap

from memprof.errors import MemprofError

_HINT = (
    "in WSL it works as on Linux (wsl --install, and memprof installed there); estimate, recommend --engine, doctor, "
    "show, compare, analyze and export work here"
)


def require_posix(what: str) -> None:
    """Raise MemprofError on Windows: `what` needs private mappings of memory, fork and signals, which it lacks."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        raise MemprofError(f"Windows is not supported for {what}", value="no private mappings of memory", hint=_HINT)
