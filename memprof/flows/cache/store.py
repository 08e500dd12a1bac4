"""The folder of cached results: one file per result, a bound on their total size, safe for concurrent processes.

Disk errors are not raised: a cache that cannot be read or written counts as empty. A file is written under a temporary
name and renamed in one step. It begins with the digest of its content, so that truncated or damaged files, and files
of another release, are ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memprof.errors import UsageError

CACHE_VARIABLE = "MEMPROF_CACHE"  # path of the cache folder; `off` disables the cache
MAX_CACHE_BYTES = 32 << 20  # of all files; the least recently used goes first; a result has about 20 KiB
_MAX_FILE_BYTES = MAX_CACHE_BYTES // 8  # bytes of one file
_MAX_UNPACKED_BYTES = 32 * _MAX_FILE_BYTES  # bytes of one file, decompressed
_HEADER_PREFIX = b"memprof answer 1 "
SUFFIX = ".answer"
_CACHE_FILE = re.compile(r"(?:[0-9a-f]{64}|\.[0-9a-f]{64}\.[^/]*)\.answer")  # a result, or a file that is being written
CLAIM_SECONDS = 60  # a claim that is older, and not renewed, is one of a process that has ended
_CLAIMANT = re.compile(rb"(\d{1,9}) (.*)", re.DOTALL)  # the process and its machine, in the file of a claim
_STALE_SECONDS = 3600  # a temporary file of this age was abandoned


def get_cache_folder(environ: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Path | None:
    """Return the folder `$MEMPROF_CACHE`, or `memprof` in the user's cache folder; None: the cache is off.

    The user's cache folder is `$XDG_CACHE_HOME` (if absolute) or ~/.cache (XDG Base Directory Specification), on macOS
    ~/Library/Caches, on Windows %LOCALAPPDATA%.
    """
    setting = environ.get(CACHE_VARIABLE)
    if setting is not None:
        return None if setting.strip().lower() in ("", "off", "0", "no") else Path(setting).expanduser().absolute()
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if platform == "win32":
        local_app_data = environ.get("LOCALAPPDATA")
        return (Path(local_app_data) if local_app_data else home / "AppData" / "Local") / "memprof" / "Cache"
    if platform == "darwin":
        return home / "Library" / "Caches" / "memprof"
    xdg_cache_home = Path(environ.get("XDG_CACHE_HOME", ""))
    return (xdg_cache_home if xdg_cache_home.is_absolute() else home / ".cache") / "memprof"


@dataclass(frozen=True, slots=True)
class CachedFile:
    """One file of the cache folder."""

    path: Path
    num_bytes: int
    last_used: float  # seconds since the epoch, when it was last written or requested


class Store:
    """The cached results in one folder, which is created with the first result; `max_bytes` None: none is removed."""

    def __init__(self, folder: Path, max_bytes: int | None = MAX_CACHE_BYTES) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.error = ""  # why the last result that could not be written was not

    def make_folder(self) -> None:
        """Make the folder if there is none; raise UsageError if that, or writing to it, is not possible."""
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError("this is a file, not a folder for answers", value=self.folder, hint="name a folder")
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            problem = f"the folder for answers cannot be written to: {error.strerror}"
            raise UsageError(problem, value=self.folder, hint="name another folder") from None

    def find(self, key: str) -> dict[str, Any] | None:
        """Return the value cached under `key`; None if the file is missing or damaged."""
        path = self._get_path(key)
        value = self.read(path)
        if value is not None:
            with contextlib.suppress(OSError):
                os.utime(path)
        return value

    def find_all(self, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return the values of those of `keys` that are cached."""
        return {key: value for key in keys if (value := self.find(key)) is not None}

    def read(self, path: Path) -> dict[str, Any] | None:
        """Return the value in a file of the folder; None if the file is damaged or cannot be read."""
        try:
            if not path.is_file():  # opening a pipe would block
                return None
            with path.open("rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
        except OSError:
            return None
        return decode(data)

    def save(self, key: str, value: dict[str, Any]) -> bool:
        """Cache a `value` of plain JSON under `key` (64 hexadecimal digits); return whether it was written."""
        data = encode(value)
        if len(data) > min(_MAX_FILE_BYTES, self.max_bytes or _MAX_FILE_BYTES):
            return False
        temporary_path = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=f".{key}.", suffix=SUFFIX, delete=False) as file:
                temporary_path = file.name
                file.write(data)
            os.replace(temporary_path, self._get_path(key))
            temporary_path = None
        except OSError as error:
            self.error = error.strerror or str(error)
            return False
        finally:
            if temporary_path is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary_path)
        if self.max_bytes is not None:
            self._evict(self.max_bytes)
        return True

    def flush(self) -> None:
        """Do nothing: `save` writes at once."""

    def claim(self, key: str) -> bool:
        """Return whether this process may compute the result of `key`: no other one has claimed it, or that one has
        ended, or has not said for a minute (`renew`) that it still does. A folder that cannot be written to refuses
        nothing."""
        path = self._get_claim(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                path.touch(mode=0o600, exist_ok=False)
            except FileExistsError:
                if time.time() - path.stat().st_mtime < CLAIM_SECONDS and not _has_ended(path.read_bytes()):
                    return False
            path.write_bytes(b"%d %s" % (os.getpid(), platform.node().encode()))
        except OSError:
            pass
        return True

    def renew(self, key: str) -> None:
        """Say that this process is still at the result of `key`, which it has claimed."""
        with contextlib.suppress(OSError):
            self._get_claim(key).touch()

    def release(self, key: str) -> None:
        """Withdraw the claim of this process on `key`."""
        _remove_file(self._get_claim(key))

    def list_entries(self) -> list[CachedFile]:
        """Return the files of all cached results, the most recently used first."""
        return sorted(
            (one for one in self._list_files() if not one.path.name.startswith(".")), key=lambda one: -one.last_used
        )

    def clear(self) -> int:
        """Remove all files of the cache, and the folder if it is then empty; return the number of results removed."""
        num_results = sum(_remove_file(file.path) and not file.path.name.startswith(".") for file in self._list_files())
        with contextlib.suppress(OSError):
            self.folder.rmdir()
        return num_results

    def _get_claim(self, key: str) -> Path:
        return self.folder / f".{key}.claim{SUFFIX}"

    def _get_path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def _list_files(self) -> list[CachedFile]:
        files = []
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    if _CACHE_FILE.fullmatch(entry.name):
                        with contextlib.suppress(OSError):  # removed by another process
                            status = entry.stat(follow_symlinks=False)
                            files.append(CachedFile(Path(entry.path), status.st_size, status.st_mtime))
        except OSError:
            return []
        return files

    def _evict(self, max_bytes: int) -> None:
        """Remove abandoned temporary files, and the least recently used results until the total size is in bounds."""
        total_bytes = 0
        for file in sorted(self._list_files(), key=lambda file: -file.last_used):
            if file.path.name.startswith("."):
                if time.time() - file.last_used > _STALE_SECONDS:
                    _remove_file(file.path)
                continue
            total_bytes += file.num_bytes
            if total_bytes > max_bytes:
                _remove_file(file.path)


def encode(value: dict[str, Any]) -> bytes:
    """Return the content of the file of a `value` of plain JSON."""
    payload = zlib.compress(json.dumps(value, separators=(",", ":")).encode(), level=3)
    return _HEADER_PREFIX + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload


def decode(data: bytes) -> dict[str, Any] | None:
    """Return the value in the content of a file; None if it is damaged."""
    header, _, payload = data.partition(b"\n")
    if len(data) > _MAX_FILE_BYTES or header != _HEADER_PREFIX + hashlib.sha256(payload).hexdigest().encode():
        return None
    try:
        value = json.loads(zlib.decompressobj().decompress(payload, _MAX_UNPACKED_BYTES))
    except (zlib.error, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _has_ended(claim: bytes) -> bool:
    """Return whether the process that wrote a claim is known to have ended: it was one of this machine."""
    match = _CLAIMANT.fullmatch(claim)
    if match is None or match[2] != platform.node().encode() or sys.platform == "win32":
        return False
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return True
    except OSError:  # the process is another user's
        pass
    return False


def _remove_file(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
