"""Files are written whole or not at all: beside their place first, then moved there in one step."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from memprof.errors import MemprofError, UsageError


def write_whole(path: Path, data: bytes, what: str = "file", *, option: str = "--to") -> None:
    """Write `data` to a file that appears at `path` once it is complete, replacing what is there.

    Errors call it `what`, and name the `option` with which another place is chosen.

    Raises:
        MemprofError: it cannot be written (no such folder, no permission, disk full); `path` is as it was.
    """
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(data)
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise MemprofError(
            f"the {what} could not be saved", value=path, hint=f"{error.strerror}: choose another place with {option}"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def check_place(path: Path, *, option: str) -> None:
    """Whether a file can be written there, before the work that it is to hold.

    Raises:
        UsageError: there is no such folder, or it is a folder itself.
    """
    if not path.parent.is_dir():
        raise UsageError("no such folder to save into", value=path.parent, hint=f"make it first, or change {option}")
    if path.is_dir():
        raise UsageError("this is a folder, not a file to save into", value=path, hint="name a file in it")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
