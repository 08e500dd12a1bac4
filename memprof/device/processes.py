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
_MAX_NAME_LENGTH = 60
_ZOMBIE = b"Z"


@dataclass(frozen=True, slots=True)
class Process:
    """One running process."""

    pid: int
    name: str  # program and script, such as "python train.py"
    resident_bytes: int  # bytes in memory now, with shared pages in full (VmRSS)
    peak_resident_bytes: int | None  # peak of `resident_bytes` (VmHWM), None if the kernel does not report it


def process_name(pid: int) -> str | None:
    """Return program and script of a process ("python train.py", "Xorg"); None if the process has ended or is not
    visible."""
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
    """Return the words that name what Python runs: the script's file name, "-m" and the module, or "-c"."""
    takes_value = False
    for index, argument in enumerate(arguments):
        if takes_value:
            takes_value = False
        elif argument == "-m":
            return ["-m", *arguments[index + 1 : index + 2]]
        elif argument == "-c":
            return ["-c"]
        elif argument in ("-W", "-X"):
            takes_value = True
        elif not argument.startswith("-"):
            return [os.path.basename(argument)]
    return []


def _clean_name(text: str) -> str:
    """Return `text` without control characters, which could disturb a terminal, and truncated."""
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= _MAX_NAME_LENGTH else text[: _MAX_NAME_LENGTH - 1] + "…"


class ProcessTree:
    """A process and its descendants, also those whose parent has ended since the last read."""

    def __init__(self, root: int) -> None:
        self._root = root
        # Pid -> start time of each known descendant of the root: pid and start together identify a process.
        self._start_by_pid: dict[int, int] = {}

    def read(self) -> tuple[Process, ...]:
        """Return the running processes of the tree, in order of pid; empty where there is no /proc."""
        parents_and_starts = _read_parents_and_starts()
        start_by_pid = {pid: start for pid, (_, start) in parents_and_starts.items()}
        tree_pids = {pid for pid, start in self._start_by_pid.items() if start_by_pid.get(pid) == start}
        if self._root in start_by_pid:
            tree_pids.add(self._root)
        children_by_pid: dict[int, list[int]] = {}
        for pid, (parent, _) in parents_and_starts.items():
            children_by_pid.setdefault(parent, []).append(pid)
        pending = list(tree_pids)
        while pending:
            for pid in children_by_pid.get(pending.pop(), ()):
                if pid not in tree_pids:
                    tree_pids.add(pid)
                    pending.append(pid)
        self._start_by_pid = {pid: start_by_pid[pid] for pid in tree_pids}
        return tuple(process for pid in sorted(tree_pids) if (process := _read_process(pid)) is not None)


def _read_parents_and_starts() -> dict[int, tuple[int, int]]:
    """Return parent pid and start (clock ticks since boot) of every running process, by pid."""
    result = {}
    for stat_file in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # proc(5): "pid (comm) state ppid ...", the start as the 22nd field; comm may hold anything but ends last.
            state, parent, *rest = stat_file.read_bytes().rpartition(b")")[2].split()
            if state != _ZOMBIE:
                result[int(stat_file.parent.name)] = int(parent), int(rest[17])
    return result


def read_own_peak_bytes() -> int | None:
    """Return the peak resident bytes of this process; None where the kernel does not report it."""
    process = _read_process(os.getpid())
    return None if process is None else process.peak_resident_bytes


def _read_process(pid: int) -> Process | None:
    status = dict(read_key_values(PROC / str(pid) / "status"))
    if not status:
        return None
    peak, resident = (int(status[name].split()[0]) << 10 if name in status else None for name in ("VmHWM", "VmRSS"))
    return Process(pid, process_name(pid) or f"process {pid}", resident or 0, peak)
