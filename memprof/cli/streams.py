"""Streams for a script's output while it runs, and for memprof's own."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import TextIO

import typer

from memprof.errors import MemprofError, printable

# What the terminal's tables, bars and curves are drawn with; as wide in ASCII, so that columns stay below each other.
_DRAWINGS = dict(zip("▁▂▃▄▅▆▇█─━│‼…×·→←", "_.:-=+*#--|!.x.><", strict=True))
_ASCII = defaultdict(lambda: "?", {ord(drawing): letter for drawing, letter in _DRAWINGS.items()})
# Streams that scripts left behind. One that wraps the buffer of another closes it when it is deleted, so none is.
_script_streams: list[object] = []


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a text, which may have names from files and programs in it, to stdout or stderr."""
    try:
        typer.echo(printable(text), err=err, nl=nl)
    except OSError:
        if not err:  # an error is told by the exit code too
            raise


def tell(error: MemprofError, *, as_json: bool, exit_code: int | None = None) -> None:
    """Say what went wrong on stderr; where JSON is requested, on stdout as JSON too."""
    say(f"memprof: {error}", err=True)
    if as_json:
        value, code = None if error.value is None else str(error.value), exit_code or error.exit_code
        fault = {"problem": error.problem, "value": value, "hint": error.hint, "exit_code": code}
        say(json.dumps({"schema": 1, "error": fault}, indent=1))


def prepare() -> None:
    """Have all three streams be there, and take any text.

    What was closed (`>&-`) goes nowhere: the next file that is opened would be taken for it. What the encoding of
    stdout lacks, such as latin-1 the bars, is written in ASCII.
    """
    codecs.register_error("ascii-art", _ascii_replacement)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="ascii-art")


def _ascii_replacement(error: UnicodeError) -> tuple[str, int]:
    """Return what stands for characters that an encoding lacks; `?` for those that are no drawing."""
    assert isinstance(error, UnicodeEncodeError)
    return error.object[error.start : error.end].translate(_ASCII), error.end


def give_up(stream: TextIO) -> None:
    """Send what is still to be written nowhere: its reader has gone, or its disk is full."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextlib.contextmanager
def script_output(*, to_stderr: bool) -> Iterator[None]:
    """Let a script replace sys.stdout and sys.stderr; after it they are what they were.

    With `to_stderr` what it writes to stdout, also past Python, goes to stderr.
    """
    out, err = sys.stdout, sys.stderr
    copies = [_copy_of(stream) for stream in (out, err)]
    if to_stderr:
        out.flush()
        kept = _Copy(1)
        os.dup2(2, 1)
        sys.stdout = err
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            _script_streams.append(stream)
            with contextlib.suppress(Exception):  # the script's own class, or a file that it closed
                stream.flush()
        sys.stderr = _usable(err, copies[1])
        if to_stderr:
            kept.restore(1)
        sys.stdout = _usable(out, copies[0])


class _Copy:
    """Another descriptor of an output's file, for a script may close or redirect the first.

    It is far above those that scripts close by number, `os.closerange(3, 64)`. One that closes all there can be
    (daemons do) closes it too, and may have opened a file of its own under the number.
    """

    def __init__(self, descriptor: int) -> None:
        self._number = _duplicate(descriptor)
        self._file = _identity(self._number)

    def take(self) -> int | None:
        """Return the descriptor, which is the caller's then; None: the script has closed it."""
        return self._number if _identity(self._number) == self._file else None

    def restore(self, descriptor: int) -> None:
        """Have `descriptor` be of the file again, and close this one; MemprofError if the script has closed it."""
        number = self.take()
        if number is None:
            raise MemprofError(
                "no report: the script has closed the descriptors that memprof keeps of its output",
                hint="leave out os.closerange and what makes a daemon of the script under memprof",
            )
        os.dup2(number, descriptor)
        os.close(number)


def _duplicate(descriptor: int) -> int:
    """Return another descriptor of the same file, three quarters up to the process's limit (to 4,096)."""
    try:
        import fcntl
        import resource
    except ImportError:  # Windows
        return os.dup(descriptor)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = 4096 if limit == resource.RLIM_INFINITY else min(limit, 4096)
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3 * most // 4)


def _identity(descriptor: int) -> tuple[int, int] | None:
    """Return device and inode of an open file; None: there is none."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _copy_of(stream: TextIO) -> _Copy | None:
    """Return a copy of a stream's descriptor; None for what is no file."""
    try:
        return _Copy(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return None


def _usable(stream: TextIO, copy: _Copy | None) -> TextIO:
    """Return the stream; another to the same file if the script closed it, or took its buffer away."""
    number = None if copy is None else copy.take()
    try:
        stream.flush()
    except (AttributeError, OSError, ValueError):
        return stream if number is None else open(number, "w", encoding="utf-8", errors="backslashreplace")
    if copy is not None and number is not None:
        copy.restore(stream.fileno())  # where the script turned the descriptor elsewhere
    return stream
