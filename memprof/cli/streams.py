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
_ASCII_DRAWINGS = dict(zip("▁▂▃▄▅▆▇█─━│‼…×·→←", "_.:-=+*#--|!.x.><", strict=True))
_ASCII_TABLE = defaultdict(lambda: "?", {ord(drawing): letter for drawing, letter in _ASCII_DRAWINGS.items()})
# Streams left by scripts, kept alive: deleting a stream closes its buffer, which other streams may share.
_script_streams: list[object] = []


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print `text` with escaped control characters to stdout, or to stderr if `err`; `nl` appends a newline."""
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
        details = {"problem": error.problem, "value": value, "hint": error.hint, "exit_code": code}
        echo(json.dumps({"schema": 1, "error": details}, indent=1))


def prepare_streams() -> None:
    """Open the standard streams that are closed, and let stdout accept any text.

    Closed streams (`>&-`) are redirected to /dev/null: the next opened file would get their descriptor. Characters that
    the encoding of stdout lacks are written in ASCII.
    """
    codecs.register_error("ascii-art", _replace_with_ascii)
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="ascii-art")


def _replace_with_ascii(error: UnicodeError) -> tuple[str, int]:
    """Return ASCII replacements for characters that an encoding lacks; `?` for characters without one."""
    assert isinstance(error, UnicodeEncodeError)
    return error.object[error.start : error.end].translate(_ASCII_TABLE), error.end


def discard_output(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, because its reader is gone, or its disk is full."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextlib.contextmanager
def protect_streams(*, to_stderr: bool) -> Iterator[None]:
    """Context manager: run a script that may replace or close sys.stdout and sys.stderr, and restore them after it.

    With `to_stderr` the script's stdout, including that of its subprocesses and C code, is redirected to stderr.
    """
    out, err = sys.stdout, sys.stderr
    descriptor_copies = [_copy_descriptor(stream) for stream in (out, err)]
    if to_stderr:
        out.flush()
        stdout_copy = _DescriptorCopy(1)
        os.dup2(2, 1)
        sys.stdout = err
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            _script_streams.append(stream)
            with contextlib.suppress(Exception):  # the script's own class, or a closed file
                stream.flush()
        sys.stderr = _restore_stream(err, descriptor_copies[1])
        if to_stderr:
            stdout_copy.restore(1)
        sys.stdout = _restore_stream(out, descriptor_copies[0])


class _DescriptorCopy:
    """A duplicate of an output file's descriptor, in case a script closes or redirects the original.

    Its number is above the range that scripts close (`os.closerange(3, 64)`). A script that closes all descriptors, as
    daemons do, closes the duplicate too, and may then have opened another file under the number.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = _duplicate_descriptor(descriptor)
        self._file = _identify_file(self._descriptor)

    def get_descriptor(self) -> int | None:
        """Return the descriptor, to be closed by the caller; None if the script has closed it."""
        return self._descriptor if _identify_file(self._descriptor) == self._file else None

    def restore(self, descriptor: int) -> None:
        """Point `descriptor` to the file again, and close the duplicate. Raises MemprofError: a script closed it."""
        copy = self.get_descriptor()
        if copy is None:
            raise MemprofError(
                "no report: the script has closed the descriptors that memprof keeps of its output",
                hint="leave out os.closerange and what makes a daemon of the script under memprof",
            )
        os.dup2(copy, descriptor)
        os.close(copy)


def _duplicate_descriptor(descriptor: int) -> int:
    """Return a duplicate of `descriptor` with a high number: at least 3/4 of the process's limit, or of 4,096."""
    try:
        import fcntl
        import resource
    except ImportError:  # Windows
        return os.dup(descriptor)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    max_descriptors = 4096 if limit == resource.RLIM_INFINITY else min(limit, 4096)
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3 * max_descriptors // 4)


def _identify_file(descriptor: int) -> tuple[int, int] | None:
    """Return device and inode of an open file; None: the descriptor is closed."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _copy_descriptor(stream: TextIO) -> _DescriptorCopy | None:
    """Return a duplicate of a stream's descriptor; None for a stream without descriptor."""
    try:
        return _DescriptorCopy(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return None


def _restore_stream(stream: TextIO, copy: _DescriptorCopy | None) -> TextIO:
    """Return `stream`, or a new stream on the file of `copy` if a script has closed or detached `stream`."""
    descriptor = None if copy is None else copy.get_descriptor()
    try:
        stream.flush()
    except (AttributeError, OSError, ValueError):
        return stream if descriptor is None else open(descriptor, "w", encoding="utf-8", errors="backslashreplace")
    if copy is not None and descriptor is not None:
        copy.restore(stream.fileno())  # in case the script redirected the descriptor
    return stream
