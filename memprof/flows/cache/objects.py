"""Answers in an object store (`s3://`, `gs://`, `memory://`, ...), one object each, through fsspec.

A put of an object is atomic, and there are no claims: two sweeps that run a cell at the same time put the same answer.
Objects are listed once, and read and written many at a time, because each request takes tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from memprof.errors import MemprofError, UsageError, first_line
from memprof.flows.cache.store import SUFFIX, Store, decode, encode
from memprof.installer import format_install_command


class ObjectStore:
    """The answers below one address of an object store."""

    def __init__(self, file_system: Any, root: str) -> None:
        self._file_system, self._root = file_system, root
        self.folder = file_system.unstrip_protocol(root)
        self._unsaved: dict[str, bytes] = {}
        try:
            self._listed = set(file_system.ls(root, detail=False))
        except FileNotFoundError:
            self._listed = set()
        except Exception as error:  # libraries of object stores have errors of their own: no credentials, no network
            raise UsageError("the store cannot be read", value=f"{self.folder} ({first_line(error)})") from None

    def find_all(self, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return the values of those of `keys` that were stored when the store was opened."""
        paths = {path: key for key in keys if (path := self._get_path(key)) in self._listed}
        if not paths:
            return {}
        data = self._file_system.cat([*paths], on_error="omit")
        return {paths[path]: value for path in paths if (value := decode(data.get(path, b""))) is not None}

    def save(self, key: str, value: dict[str, Any]) -> None:
        """Have a `value` of plain JSON stored under `key` with the next `flush`."""
        self._unsaved[self._get_path(key)] = encode(value)

    def flush(self) -> None:
        """Write what is not yet stored; raise MemprofError if it cannot be."""
        if not self._unsaved:
            return
        try:
            self._file_system.pipe(self._unsaved)
        except Exception as error:  # as above
            raise MemprofError("answers cannot be stored", value=f"{self.folder} ({first_line(error)})") from None
        self._unsaved = {}

    def _get_path(self, key: str) -> str:
        return f"{self._root}/{key}{SUFFIX}"


def open_address(address: str) -> Store | ObjectStore:
    """Return the store at an address such as s3://BUCKET/FOLDER. Raises UsageError: the protocol is unknown, its
    package is not installed, or the address cannot be read."""
    try:
        file_system, root = url_to_fs(address)
    except ImportError as error:
        package = known_implementations[address.partition("://")[0]]["class"].partition(".")[0]
        hint = None if package == "fsspec" else format_install_command(package)
        raise UsageError("a package is missing for this address", value=f"{address} ({error})", hint=hint) from None
    except Exception as error:  # of the address, or of the library that reads it
        hint = "give a folder, or an address such as s3://BUCKET/FOLDER"
        raise UsageError("no such address", value=f"{address} ({first_line(error)})", hint=hint) from None
    return Store(Path(root), None) if isinstance(file_system, LocalFileSystem) else ObjectStore(file_system, root)
