"""Standard streams of memprof, and of a script while it runs."""

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

# Characters of tables, bars and curves, and an ASCII character of the same width for each.
_DRAWINGS = dict(zip("▁▂▃▄▅▆▇█─━│‼…×·→←", "_.:-=+*#--|!.x.><", strict=True))
_ASCII = defaultdict(lambda: "?", {ord(drawing): letter for drawing, letter in _DRAWINGS.items()})
# Streams left by scripts, kept alive: deleting a stream closes its buffer, which other streams may share.
_script_streams: list[object] = []


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text to stdout or stderr, with escaped control characters."""
    try:
        typer.echo(printable(text), err=err, nl=nl)
    except OSError:
        if not err:  # errors also have an exit code
            raise


def report_error(error: MemprofError, *, as_json: bool, exit_code: int | None = None) -> None:
    """Print an error on stderr, and with `as_json` also on stdout as JSON."""
    echo(f"memprof: {error}", err=True)
    if as_json:
        value, code = None if error.value is None else str(error.value), exit_code or error.exit_code
        fault = {"problem": error.problem, "value": value, "hint": error.hint, "exit_code": code}
        echo(json.dumps({"schema": 1, "error": fault}, indent=1))


def prepare_streams() -> None:
    """Open the standard streams that are closed, and let stdout accept any text.

    Closed streams (`>&-`) are redirected to /dev/null: the next opened file would get their descriptor. Characters that
    the encoding of stdout lacks are written in ASCII.
    """
    codecs.register_error("ascii-art", _replace_with_ascii)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="ascii-art")


def _replace_with_ascii(error: UnicodeError) -> tuple[str, int]:
    """Return ASCII replacements for characters that an encoding lacks; `?` for characters without one."""
    assert isinstance(error, UnicodeEncodeError)
    return error.object[error.start : error.end].translate(_ASCII), error.end


def discard_output(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, because its reader is gone, or its disk is full."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextlib.contextmanager
def script_output(*, to_stderr: bool) -> Iterator[None]:
    """Context manager: restore sys.stdout and sys.stderr after a script that may replace or close them.

    With `to_stderr` the script's stdout, also from outside Python, goes to stderr.
    """
    out, err = sys.stdout, sys.stderr
    copies = [_copy_descriptor(stream) for stream in (out, err)]
    if to_stderr:
        out.flush()
        saved = _DescriptorCopy(1)
        os.dup2(2, 1)
        sys.stdout = err
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            _script_streams.append(stream)
            with contextlib.suppress(Exception):  # the script's own class, or a closed file
                stream.flush()
        sys.stderr = _restore_stream(err, copies[1])
        if to_stderr:
            saved.restore(1)
        sys.stdout = _restore_stream(out, copies[0])


class _DescriptorCopy:
    """A duplicate of an output file's descriptor, in case a script closes or redirects the original.

    Its number is above the range that scripts close (`os.closerange(3, 64)`). A script that closes all descriptors, as
    daemons do, closes the duplicate too, and may then have opened another file under the number.
    """

    def __init__(self, descriptor: int) -> None:
        self._number = _duplicate_descriptor(descriptor)
        self._file = _identify_file(self._number)

    def get_open(self) -> int | None:
        """Return the descriptor, to be closed by the caller; None if the script has closed it."""
        return self._number if _identify_file(self._number) == self._file else None

    def restore(self, descriptor: int) -> None:
        """Point `descriptor` to the file again, and close the duplicate. Raises MemprofError: a script closed it."""
        number = self.get_open()
        if number is None:
            raise MemprofError(
                "no report: the script has closed the descriptors that memprof keeps of its output",
                hint="leave out os.closerange and what makes a daemon of the script under memprof",
            )
        os.dup2(number, descriptor)
        os.close(number)


def _duplicate_descriptor(descriptor: int) -> int:
    """Return a duplicate descriptor, numbered from three quarters of the process's limit (at most 4,096) up."""
    try:
        import fcntl
        import resource
    except ImportError:  # Windows
        return os.dup(descriptor)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = 4096 if limit == resource.RLIM_INFINITY else min(limit, 4096)
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3 * most // 4)


def _identify_file(descriptor: int) -> tuple[int, int] | None:
    """Return device and inode of an open file; None: the descriptor is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _copy_descriptor(stream: TextIO) -> _DescriptorCopy | None:
    """Return a duplicate of a stream's descriptor; None for a stream without descriptor."""
    try:
        return _DescriptorCopy(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return None


def _restore_stream(stream: TextIO, copy: _DescriptorCopy | None) -> TextIO:
    """Return the stream, or a new stream on the same file if the script has closed or detached it."""
    number = None if copy is None else copy.get_open()
    try:
        stream.flush()
    except (AttributeError, OSError, ValueError):
        return stream if number is None else open(number, "w", encoding="utf-8", errors="backslashreplace")
    if copy is not None and number is not None:
        copy.restore(stream.fileno())  # in case the script redirected the descriptor
    return stream
