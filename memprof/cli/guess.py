"""`memprof` alone prints the common questions with their command; `memprof FILE` chooses the command for a file."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path

from memprof.errors import UsageError

WELCOME = """\
memprof: where the memory of a PyTorch run goes, and whether it fits a GPU. It needs no GPU.

  Will my script fit?            memprof run train.py
  Will this model fit?           memprof profile --model-size 4B --context-length 8192
  Why did it run out of memory?  memprof doctor error.log
  What do I change?              memprof run --fix auto train.py
  Which GPU do I need?           memprof recommend --model-size 4B
  Will vLLM start with it?       memprof recommend --engine vllm --model qwen3-8b --gpu rtx-4090

memprof FILE takes the command that suits a script, an error's log, a snapshot of torch or a saved run.
memprof --help lists all commands."""
_HEAD_BYTES = 4096


def guess_command(name: str) -> str | None:
    """Return the command that reads the file `name`: run, analyze, show or doctor; None: `name` is not one of a file.

    Raises UsageError: `name` has a file's extension or a folder, and there is no such file, or it is of another kind.
    """
    command = _guess_by_content(Path(name))
    if command is None and (Path(name).suffix or os.sep in name):
        raise UsageError(
            "there is no such file, or it is none that memprof reads",
            value=name,
            hint="give a script (.py), a log, a snapshot of torch or what --save or --json wrote",
        )
    return command


def _guess_by_content(path: Path) -> str | None:
    try:
        if not path.is_file():
            return None
        if path.suffix == ".py":
            return "run"
        with path.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
        if head.startswith(b"\x1f\x8b"):
            with gzip.open(path) as stream:
                head = stream.read(_HEAD_BYTES)
            return "analyze" if head.startswith(b"\x80") else "show"
    except (OSError, EOFError, zlib.error, ValueError):  # ValueError: a name with a null character
        return None
    if head.startswith(b"\x80"):  # a pickle
        return "analyze"
    if head.lstrip().startswith(b"{"):
        return "show"
    return None if b"\0" in head or not head.strip() else "doctor"
