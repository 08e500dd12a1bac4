"""Where a script's output goes while it runs, and how memprof writes its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from typing import TextIO

import typer

from memprof.errors import MemprofError, printable

_theirs: list[object] = []
"""Streams that scripts left behind. One that wraps the buffer of another closes it when it dies, so none dies."""


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a text, which may have names from files and programs in it, to stdout or stderr."""
    try:
        typer.echo(printable(text), err=err, nl=nl)
    except OSError:
        if not err:  # an error is told by the exit code too
            raise


def tell(error: MemprofError, *, as_json: bool, exit_code: int | None = None) -> None:
    """Say what went wrong on stderr; where JSON is asked for, on stdout as JSON too."""
    say(f"memprof: {error}", err=True)
    if as_json:
        value = None if error.value is None else str(error.value)
        fault = {
            "problem": error.problem,
            "value": value,
            "hint": error.hint,
            "exit_code": exit_code or error.exit_code,
        }
        say(json.dumps({"schema": 1, "error": fault}, indent=1))


def prepare() -> None:
    """All three streams are there, and take any text.

    What was closed (`>&-`) goes nowhere: the next file that is opened would be taken for it. What the encoding of
    stdout lacks, such as latin-1 the bars, is written as `?`; stderr is that way already.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def give_up(stream: TextIO) -> None:
    """Whatever is still to be written to it goes nowhere: its reader has gone, or its disk is full."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextlib.contextmanager
def script_output(*, to_stderr: bool) -> Iterator[None]:
    """Inside, a script may replace sys.stdout and sys.stderr; after it they are what they were.

    Args:
        to_stderr: what the script writes to stdout, also past Python, goes to stderr.
    """
    out, err = sys.stdout, sys.stderr
    fallback = _copies_of(out, err)
    if to_stderr:
        out.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
        sys.stdout = err
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            _theirs.append(stream)
            with contextlib.suppress(Exception):  # the script's own class, or a file that it closed
                stream.flush()
        if to_stderr:
            os.dup2(kept, 1)
            os.close(kept)
        sys.stdout, sys.stderr = _usable(out, fallback[0]), _usable(err, fallback[1])


def _copies_of(*streams: TextIO) -> list[int | None]:
    """Descriptors of the same files, for a script may close a stream; None for what is no file."""
    copies: list[int | None] = []
    for stream in streams:
        try:
            copies.append(os.dup(stream.fileno()))
        except (AttributeError, OSError, ValueError):
            copies.append(None)
    return copies


def _usable(stream: TextIO, copy: int | None) -> TextIO:
    """The stream; another to the same file if the script closed it, or took its buffer away."""
    try:
        stream.flush()
    except (AttributeError, OSError, ValueError):
        if copy is not None:
            return open(copy, "w", encoding="utf-8", errors="backslashreplace")
    if copy is not None:
        os.dup2(copy, stream.fileno())  # where the script turned the descriptor elsewhere
        os.close(copy)
    return stream
