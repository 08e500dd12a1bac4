"""Cached results of runs whose inputs can all be checked for changes.

Simulated runs of the catalog's models, of sizes and of local configurations are cached. The user's code, code from the
hub and compilers may read any file, so their runs are never cached.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from memprof.errors import MemprofError
from memprof.flows.cache.inputs import are_files_unchanged, describe_environment, stamp_loaded_files
from memprof.flows.cache.store import Store, get_cache_folder
from memprof.spec import TargetSpec
from memprof.trace.json_values import JsonValue, to_plain
from memprof.workload.catalog import has_model, read_config_file

_FORMAT_VERSION = 1  # version of the cached format
_MAX_HASHED_FILE_BYTES = 16 << 20  # bytes of the largest file that is hashed to detect a change
_NO_CUDA_PATTERN = re.compile(r"^cuda\b[^=]*=\s*None\s*$", re.MULTILINE)

_Result = TypeVar("_Result", bound=JsonValue)


@dataclass(frozen=True, slots=True)
class ResultCacheEntry:
    """The place of one result in the cache, which may be empty: the store, and the key of the result."""

    store: Store
    key: str
    command_line: str  # the command line, for the user

    def find(self, result_type: type[_Result]) -> tuple[_Result, float] | None:
        """Return the result and its age in seconds; None if nothing is cached, or an input has changed."""
        entry = self.store.find(self.key)
        if entry is None or not isinstance(entry.get("files"), list) or not are_files_unchanged(entry["files"]):
            return None
        try:
            return result_type.from_json(entry["answer"]), max(time.time() - float(entry["given"]), 0.0)
        except (KeyError, TypeError, ValueError):
            return None

    def save(self, result: JsonValue) -> None:
        """Cache a result, if its JSON can be read back unchanged."""
        files = stamp_loaded_files()
        if files is None:
            return
        json_value = json.loads(json.dumps(result.to_json()))
        try:
            is_unchanged = json.loads(json.dumps(type(result).from_json(json_value).to_json())) == json_value
        except ValueError:
            return
        if is_unchanged:
            self.store.save(
                self.key, {"said": self.command_line, "given": time.time(), "files": files, "answer": json_value}
            )


def find_cache_entry(
    command: str, spec: TargetSpec, options: dict[str, Any], arguments: Sequence[str]
) -> ResultCacheEntry | None:
    """Return the cache entry of a command line (`arguments`); None if the cache is off, or an input cannot be checked
    for changes. `options` are the options of `command` that are not in `spec`."""
    folder = get_cache_folder()
    if folder is None or spec.device != "virtual" or spec.compile or spec.trust_remote_code:
        return None
    files = [*_hash_config(spec), *_hash_length_files(spec.lengths), *_hash_length_files(options.get("lengths"))]
    if None in files:
        return None
    key_fields = [_FORMAT_VERSION, command, to_plain(spec), to_plain(options), files, describe_environment()]
    key_text = json.dumps(key_fields, sort_keys=True, default=str)
    return ResultCacheEntry(
        Store(folder), hashlib.sha256(key_text.encode(errors="surrogatepass")).hexdigest(), shlex.join(arguments)
    )


def is_torch_without_cuda() -> bool:
    """Return whether the installed torch is built without CUDA, from the text of torch/version.py, without import."""
    torch_spec = importlib.util.find_spec("torch")
    if torch_spec is None or torch_spec.origin is None:
        return False
    try:
        version_code = Path(torch_spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return _NO_CUDA_PATTERN.search(version_code) is not None


def _hash_config(spec: TargetSpec) -> list[list[str] | None]:
    """Return path and hash of the model's configuration file; [None] if the model also depends on other files."""
    if spec.model_is_size or has_model(spec.model):
        return []
    path = Path(spec.model).expanduser()
    if spec.model.endswith(".py") or not path.exists():
        return [None]
    try:
        file, config = read_config_file(path)
    except MemprofError:
        return [None]
    return [None if "auto_map" in config else _hash_file(file)]


def _hash_length_files(lengths: str | None) -> list[list[str] | None]:
    """Return path and hash of each existing file that `lengths` may name; the name may have commas in it."""
    parts = (lengths or "").split(",")
    names = [",".join(parts[:num_parts]) for num_parts in range(1, len(parts) + 1)]
    return [_hash_file(Path(name).expanduser()) for name in names if name and os.path.lexists(Path(name).expanduser())]


def _hash_file(file: Path) -> list[str] | None:
    try:
        if not file.is_file() or file.stat().st_size > _MAX_HASHED_FILE_BYTES:
            return None
        return [str(file.resolve()), hashlib.sha256(file.read_bytes()).hexdigest()]
    except OSError:
        return None
