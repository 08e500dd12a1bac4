"""Processes of this machine, as Linux shows them in /proc: names, resident memory, and descendants.

Nothing here raises: a process may end between two reads, and another user's process may be hidden.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from memprof.device.host import read_key_values

PROC = Path("/proc")
_MAX_NAME = 60
_ZOMBIE = b"Z"


@dataclass(frozen=True, slots=True)
class Process:
    """One running process."""

    pid: int
    name: str  # program and script, such as "python train.py"
    resident_bytes: int  # bytes in memory now, with shared pages in full (VmRSS)
    peak_resident_bytes: int | None  # peak of `resident_bytes` (VmHWM), None if the kernel does not report it


def process_name(pid: int) -> str | None:
    """Return program and script of a process ("python train.py", "Xorg"), None if the process has ended
    or is hidden."""
    try:
        arguments = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
        words = [word.decode(errors="replace") for word in arguments if word]
        if not words:  # a kernel thread, or an ending process
            return (PROC / str(pid) / "comm").read_text(errors="replace").strip() or None
    except OSError:
        return None
    name = os.path.basename(words[0])
    if name.startswith(("python", "pypy")):
        name = " ".join([name, *_find_script(words[1:])])
    return _clean_name(name)


def _find_script(arguments: list[str]) -> list[str]:
    """Return the program that Python runs: the script's file name, or the module of -m."""
    takes_value = False
    for number, argument in enumerate(arguments):
        if takes_value:
            takes_value = False
        elif argument == "-m":
            return ["-m", *arguments[number + 1 : number + 2]]
        elif argument == "-c":
            return ["-c"]
        elif argument in ("-W", "-X"):
            takes_value = True
        elif not argument.startswith("-"):
            return [os.path.basename(argument)]
    return []


def _clean_name(text: str) -> str:
    """Replace control characters, which would disturb a terminal, and truncate long text."""
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= _MAX_NAME else text[: _MAX_NAME - 1] + "…"


class ProcessTree:
    """A process and its descendants, also descendants whose parent has ended since they were first seen."""

    def __init__(self, root: int) -> None:
        self._root = root
        # Pid -> start time of each known descendant of the root: pid and start together identify a process.
        self._known: dict[int, int] = {}

    def read(self) -> tuple[Process, ...]:
        """Return the running processes of the tree, by pid; empty where there is no /proc."""
        running = _read_parents_and_starts()
        starts = {pid: started for pid, (_, started) in running.items()}
        found = {pid for pid, started in self._known.items() if starts.get(pid) == started}
        if self._root in starts:
            found.add(self._root)
        children: dict[int, list[int]] = {}
        for pid, (parent, _) in running.items():
            children.setdefault(parent, []).append(pid)
        pending = list(found)
        while pending:
            for pid in children.get(pending.pop(), ()):
                if pid not in found:
                    found.add(pid)
                    pending.append(pid)
        self._known = {pid: starts[pid] for pid in found}
        return tuple(process for pid in sorted(found) if (process := _read_process(pid)) is not None)


def _read_parents_and_starts() -> dict[int, tuple[int, int]]:
    """Return parent and start (clock ticks since boot), by pid, of every process that has not ended."""
    found = {}
    for stat in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # proc(5): "pid (comm) state ppid ...", the start as the 22nd field; comm may hold anything but ends last.
            state, parent, *rest = stat.read_bytes().rpartition(b")")[2].split()
            if state != _ZOMBIE:
                found[int(stat.parent.name)] = int(parent), int(rest[17])
    return found


def own_peak_bytes() -> int | None:
    """Return the peak resident bytes of this process; None where the kernel does not report it."""
    process = _read_process(os.getpid())
    return None if process is None else process.peak_resident_bytes


def _read_process(pid: int) -> Process | None:
    status = dict(read_key_values(PROC / str(pid) / "status"))
    if not status:
        return None
    peak, resident = (int(status[name].split()[0]) << 10 if name in status else None for name in ("VmHWM", "VmRSS"))
    return Process(pid, process_name(pid) or f"process {pid}", resident or 0, peak)
