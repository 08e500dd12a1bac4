"""Files are written whole or not at all: beside their place first, then moved there in one step.

What stands at their place is replaced if memprof wrote it, or if that was requested: a slip of the pen in a file's name
must not cost somebody a file.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memprof.errors import MemprofError, UsageError

_LOOK_BYTES = 4096  # so much of a file's begin and of its end says whether memprof wrote it


@dataclass(frozen=True)
class FileKind:
    """A kind of file that memprof writes."""

    name: str  # in errors, such as "capture"
    option: str  # with which its place is chosen
    is_ours: Callable[[bytes, bytes], bool]  # of a file's begin and end: whether memprof wrote it


def table_form(name: str, option: str, header: bytes) -> FileKind:
    """Return a CSV file of which memprof's own are known by their first line."""
    return FileKind(name, option, lambda begin, end: begin.startswith(header + b"\n"))


def write_atomically(path: Path, data: bytes, form: FileKind, *, force: bool = False) -> None:
    """Write `data` to a file that appears at `path` once it is complete.

    A link stays a link to the file that is replaced, and who may read it stays so. What is no regular file (a pipe,
    /dev/null) is written to.

    Args:
        force: replace a file that memprof has not written, too.

    Raises:
        UsageError: another file is there, or something that cannot be written to.
        MemprofError: it cannot be written (no such folder, no permission, disk full); `path` is as it was.
    """
    temporary = None
    check_output_path(path, form, force=force)
    try:
        if path.exists() and not path.is_file():
            _write_through(path, data)
            return
        place = path.resolve()
        # Of a name that is nearly too long already, the one beside it must not be too long.
        with tempfile.NamedTemporaryFile(dir=place.parent, prefix=f".{place.name[:40]}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(data)
        there = _status(place)
        temporary.chmod(0o666 & ~_umask() if there is None else stat.S_IMODE(there.st_mode))
        os.replace(temporary, place)
        temporary = None
    except OSError as error:
        raise MemprofError(
            f"the {form.name} could not be saved",
            value=path,
            hint=f"{error.strerror}: choose another place with {form.option}",
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def check_output_path(path: Path, form: FileKind, *, force: bool = False) -> None:
    """Check that a file can be written there, before the work that it is to hold.
    Raises UsageError: there is no such folder, it is a folder itself, or a file that must not be replaced."""
    another = f"change {form.option}"
    try:
        there = _status(path)
        if not path.parent.is_dir():
            raise UsageError("no such folder to save into", value=path.parent, hint=f"make it first, or {another}")
        if there is None:
            return
        if stat.S_ISDIR(there.st_mode):
            raise UsageError("this is a folder, not a file to save into", value=path, hint="name a file in it")
        if stat.S_ISREG(there.st_mode):
            _check_replaceable(path, there, form, force)
        elif not (stat.S_ISCHR(there.st_mode) or stat.S_ISFIFO(there.st_mode)):
            raise UsageError("this is no file that can be written to", value=path, hint=another)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError("this is no place to save to", value=f"{path} ({reason})", hint=another) from error


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _check_replaceable(path: Path, there: os.stat_result, form: FileKind, force: bool) -> None:
    if not there.st_mode & 0o222:
        # Also for root, who may write to it: somebody took care that nobody does.
        raise UsageError("this file is read-only", value=path, hint=f"change {form.option}, or make it writable")
    if there.st_size and not force:
        with path.open("rb") as file:
            begin = file.read(_LOOK_BYTES)
            file.seek(max(0, there.st_size - _LOOK_BYTES))
            end = file.read(_LOOK_BYTES)
        if not form.is_ours(begin, end):
            raise UsageError(
                f"this file is there already, and is no {form.name} of memprof",
                value=path,
                hint=f"change {form.option}, or replace it with --force",
            )


def _write_through(path: Path, data: bytes) -> None:
    # A pipe that nobody reads is an error, and not waited for.
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    os.set_blocking(descriptor, True)
    with open(descriptor, "wb") as file:
        file.write(data)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
