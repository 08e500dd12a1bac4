"""Atomic writing of files: a temporary file in the same folder is completed first, then renamed.

An existing file is replaced only if memprof wrote that file or the caller forces it: a typing error in a file name must
not destroy a user's file.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memprof.errors import MemprofError, UsageError

GZIP_MAGIC = b"\x1f\x8b"  # the first bytes of a capture
PICKLE_MAGIC = b"\x80"  # the first byte of a snapshot of torch
_PROBE_BYTES = 4096  # bytes at a file's begin and end that show whether memprof wrote the file


@dataclass(frozen=True)
class FileKind:
    """A kind of file that memprof writes, and how to recognize it."""

    name: str  # in errors, such as "capture"
    option: str  # the option that sets the path
    is_ours: Callable[[bytes, bytes], bool]  # whether memprof wrote a file with this begin and this end
    to_replace: str = "replace it with --force"  # what to do with another file at the path


def csv_kind(name: str, option: str, header: bytes) -> FileKind:
    """Return the kind of a CSV file that begins with the line `header`, by which memprof recognizes its own files."""
    return FileKind(name, option, lambda begin, end: begin.startswith(header + b"\n"))


def read_head(path: Path, kinds: str) -> bytes:
    """Return the first 64 bytes of a file; raise UsageError, which suggests `kinds`, if unreadable or empty."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise UsageError(
            "cannot read the file", value=f"{path} ({error.strerror or type(error).__name__})", hint=f"give {kinds}"
        ) from None
    if not head:
        raise UsageError("the file is empty", value=path, hint=f"give {kinds}")
    return head


def write_atomically(path: Path, data: bytes, file_kind: FileKind, *, force: bool = False) -> None:
    """Write `data` to a file that appears at `path` once it is complete.

    A symbolic link is kept, and its target is replaced; permissions are kept. Data for a path that is no regular file
    (a pipe, /dev/null) is written directly.

    Args:
        force: also replace a file that memprof has not written.

    Raises:
        UsageError: another file, or something that cannot be written to, is at `path`.
        MemprofError: the file cannot be written (no such folder, no permission, disk full); `path` is unchanged.
    """
    temporary = None
    check_output_path(path, file_kind, force=force)
    try:
        if path.exists() and not path.is_file():
            _write_in_place(path, data)
            return
        target = path.resolve()
        # The temporary name must not be too long where the name itself is nearly too long.
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name[:40]}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(data)
        status = _read_status(target)
        temporary.chmod(0o666 & ~_read_umask() if status is None else stat.S_IMODE(status.st_mode))
        os.replace(temporary, target)
        temporary = None
    except OSError as error:
        raise MemprofError(
            f"the {file_kind.name} could not be saved",
            value=path,
            hint=f"{error.strerror}: choose another place with {file_kind.option}",
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def check_output_path(path: Path, file_kind: FileKind, *, force: bool = False) -> None:
    """Check that a file can be written to `path`, before the work that produces its content. Raises UsageError: the
    folder does not exist, or `path` is a folder or a file that must not be replaced."""
    hint = f"change {file_kind.option}"
    try:
        status = _read_status(path)
        if not path.parent.is_dir():
            raise UsageError("no such folder to save into", value=path.parent, hint=f"make it first, or {hint}")
        if status is None:
            return
        if stat.S_ISDIR(status.st_mode):
            raise UsageError("this is a folder, not a file to save into", value=path, hint="name a file in it")
        if stat.S_ISREG(status.st_mode):
            _check_replaceable(path, status, file_kind, force)
        elif not (stat.S_ISCHR(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
            raise UsageError("this is no file that can be written to", value=path, hint=hint)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError("this is no place to save to", value=f"{path} ({reason})", hint=hint) from error


def _read_status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _check_replaceable(path: Path, status: os.stat_result, file_kind: FileKind, force: bool) -> None:
    if not status.st_mode & 0o222:
        # Also for root, who may write: a read-only file is protected on purpose.
        raise UsageError("this file is read-only", value=path, hint=f"change {file_kind.option}, or make it writable")
    if status.st_size and not force:
        with path.open("rb") as file:
            begin = file.read(_PROBE_BYTES)
            file.seek(max(0, status.st_size - _PROBE_BYTES))
            end = file.read(_PROBE_BYTES)
        if not file_kind.is_ours(begin, end):
            raise UsageError(
                f"this file is there already, and is no {file_kind.name} of memprof",
                value=path,
                hint=f"change {file_kind.option}, or {file_kind.to_replace}",
            )


def _write_in_place(path: Path, data: bytes) -> None:
    # A pipe without a reader is an error; opening must not block.
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    os.set_blocking(descriptor, True)
    with open(descriptor, "wb") as file:
        file.write(data)


def _read_umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
