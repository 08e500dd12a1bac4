"""The computer itself, as a device to measure on: its processor's name and its memory. Records, never sets."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")


def processor_name() -> str:
    """The processor as the system calls it."""
    try:
        for line in _CPUINFO.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "Hardware") and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


def memory_bytes() -> int | None:
    """Physical memory; None where the system does not tell."""
    total = _meminfo("MemTotal")
    if total is not None:
        return total
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def available_bytes() -> int | None:
    """Memory that programs may take now without swapping; None where the system does not tell."""
    return _meminfo("MemAvailable")


def _meminfo(key: str) -> int | None:
    try:
        for line in _MEMINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == key:
                return int(value.split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        pass
    return None
