"""The host: processor name and memory, read from the system."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")


def processor_name() -> str:
    """Return the processor's name, such as "AMD EPYC 7543"."""
    for key, value in read_key_values(_CPUINFO):
        if key in ("model name", "Model", "Hardware") and value:
            return value
    return platform.processor() or platform.machine() or "CPU"


def memory_bytes() -> int | None:
    """Return the bytes of physical memory; None where the system does not report them."""
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
    """Return names and values in a file such as /proc/meminfo; an empty list if the file cannot be read."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
