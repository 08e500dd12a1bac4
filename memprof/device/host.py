"""The computer as a device to measure on: processor name and memory. Read-only."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")


def processor_name() -> str:
    """Return the system's name of the processor."""
    for key, value in read_key_values(_CPUINFO):
        if key in ("model name", "Model", "Hardware") and value:
            return value
    return platform.processor() or platform.machine() or "CPU"


def memory_bytes() -> int | None:
    """Return physical memory in bytes; None where the system does not report it."""
    total = _read_meminfo("MemTotal")
    if total is not None:
        return total
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def available_bytes() -> int | None:
    """Return the bytes that programs can allocate now without swapping; None where the system does not report them."""
    return _read_meminfo("MemAvailable")


def _read_meminfo(key: str) -> int | None:
    try:
        return next((int(value.split()[0]) * 1024 for name, value in read_key_values(_MEMINFO) if name == key), None)
    except (IndexError, ValueError):
        return None


def read_key_values(file: Path) -> list[tuple[str, str]]:
    """Return names and values of a kernel file such as /proc/meminfo; an empty list where there is no such file."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
