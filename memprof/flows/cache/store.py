"""The folder of cached results: a file each, bounded together, and safe for several processes at once.

Nothing here raises for what a disk does: a cache that cannot be read or written is one that has nothing. A file is
written beside its place and moved there in one step, and begins with the digest of its content, so that one that is
cut off, damaged or of another release is none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "MEMPROF_CACHE"  # another folder; `off`: none
MOST_BYTES = 32 << 20  # Of all files; the one that was requested least recently goes first. An answer has about 20 KiB.
_LARGEST = MOST_BYTES // 8  # of one file
_UNPACKED = 32 * _LARGEST
_FORM = b"memprof answer 1 "
_SUFFIX = ".answer"
_OURS = re.compile(r"(?:[0-9a-f]{64}|\.[0-9a-f]{64}\.[^/]*)\.answer")  # an answer, or one that is being written
_STALE_SECONDS = 3600  # what is being written for so long was given up


def cache_folder(environ: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Path | None:
    """Return where answers are kept: `$MEMPROF_CACHE`, or `memprof` in the user's cache folder; None: nowhere.

    That is `$XDG_CACHE_HOME` or ~/.cache (XDG Base Directory Specification, which ignores relative paths), on macOS
    ~/Library/Caches, on Windows %LOCALAPPDATA%.
    """
    asked = environ.get(VARIABLE)
    if asked is not None:
        return None if asked.strip().lower() in ("", "off", "0", "no") else Path(asked).expanduser().absolute()
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if platform == "win32":
        local = environ.get("LOCALAPPDATA")
        return (Path(local) if local else home / "AppData" / "Local") / "memprof" / "Cache"
    if platform == "darwin":
        return home / "Library" / "Caches" / "memprof"
    given = Path(environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else home / ".cache") / "memprof"


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file of the folder."""

    path: Path
    num_bytes: int
    used: float  # seconds since the epoch, when it was last written or requested


class Store:
    """The answers in one folder, which is made when the first is kept."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder = folder
        self.most_bytes = most_bytes

    def find(self, key: str) -> dict[str, Any] | None:
        """Return what was kept under `key`; None where nothing whole is there."""
        path = self._path(key)
        value = self.read(path)
        if value is not None:
            with contextlib.suppress(OSError):
                os.utime(path)
        return value

    def read(self, path: Path) -> dict[str, Any] | None:
        """Return what a file of the folder has; None where it is not whole."""
        try:
            if not path.is_file():  # a pipe would be waited for
                return None
            with path.open("rb") as file:
                data = file.read(_LARGEST + 1)
        except OSError:
            return None
        head, _, packed = data.partition(b"\n")
        if len(data) > _LARGEST or head != _FORM + hashlib.sha256(packed).hexdigest().encode():
            return None
        try:
            unpacked = zlib.decompressobj().decompress(packed, _UNPACKED)
            value = json.loads(unpacked)
        except (zlib.error, ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    def keep(self, key: str, value: dict[str, Any]) -> bool:
        """Keep a `value` of plain JSON under `key` (64 hexadecimal digits), within the bound; return whether it is."""
        packed = zlib.compress(json.dumps(value, separators=(",", ":")).encode(), level=3)
        data = _FORM + hashlib.sha256(packed).hexdigest().encode() + b"\n" + packed
        if len(data) > min(_LARGEST, self.most_bytes):
            return False
        temporary = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=f".{key}.", suffix=_SUFFIX, delete=False) as file:
                temporary = file.name
                file.write(data)
            os.replace(temporary, self._path(key))
            temporary = None
        except OSError:
            return False
        finally:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
        self._bound()
        return True

    def entries(self) -> list[CachedFile]:
        """Return all files, what was requested last first."""
        return sorted((one for one in self._files() if not one.path.name.startswith(".")), key=lambda one: -one.used)

    def clear(self) -> int:
        """Remove all that memprof has written there, and the folder if nothing else is in it; how many answers went."""
        answers = sum(_remove(one.path) and not one.path.name.startswith(".") for one in self._files())
        with contextlib.suppress(OSError):
            self.folder.rmdir()
        return answers

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _files(self) -> list[CachedFile]:
        found = []
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    if _OURS.fullmatch(entry.name):
                        with contextlib.suppress(OSError):  # gone meanwhile
                            status = entry.stat(follow_symlinks=False)
                            found.append(CachedFile(Path(entry.path), status.st_size, status.st_mtime))
        except OSError:
            return []
        return found

    def _bound(self) -> None:
        """Remove what was requested least recently, until the rest is within the bound."""
        total = 0
        for one in sorted(self._files(), key=lambda one: -one.used):
            if one.path.name.startswith("."):
                if time.time() - one.used > _STALE_SECONDS:
                    _remove(one.path)
                continue
            total += one.num_bytes
            if total > self.most_bytes:
                _remove(one.path)


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
