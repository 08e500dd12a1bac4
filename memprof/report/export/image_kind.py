"""The kind of file that a picture is: apart from image.py, so that `--image` is checked before what draws it."""

from __future__ import annotations

from pathlib import Path

from memprof.errors import UsageError
from memprof.trace.files import FileKind

# Both formats keep who wrote them near their beginning.
IMAGE = FileKind("picture", "--image", lambda begin, end: b"memprof" in begin)
_SUFFIXES = (".png", ".svg")


def check_suffix(path: Path) -> None:
    """Raise UsageError unless `path` ends with the suffix of a format that pictures are written in."""
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError("no such kind of picture", value=path, hint=f"name a file with {' or '.join(_SUFFIXES)}")
