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
from memprof.flows.cache.inputs import are_unchanged, describe_environment, loaded_files
from memprof.flows.cache.store import Store, cache_folder
from memprof.spec import TargetSpec
from memprof.trace.json_values import JsonValue, to_plain
from memprof.workload.catalog import has_model, read_config_file

_FORM = 1  # version of the cached format
_LARGEST_FILE = 16 << 20  # bytes of the largest file that is hashed to detect a change
_NO_CUDA = re.compile(r"^cuda\b[^=]*=\s*None\s*$", re.MULTILINE)

_Answer = TypeVar("_Answer", bound=JsonValue)


@dataclass(frozen=True, slots=True)
class ResultCacheEntry:
    """One cached result."""

    store: Store
    key: str
    said: str  # the command line, for the user

    def find(self, kind: type[_Answer]) -> tuple[_Answer, float] | None:
        """Return the result and its age in seconds; None if nothing is cached, or an input has changed."""
        entry = self.store.find(self.key)
        if entry is None or not isinstance(entry.get("files"), list) or not are_unchanged(entry["files"]):
            return None
        try:
            return kind.from_json(entry["answer"]), max(time.time() - float(entry["given"]), 0.0)
        except (KeyError, TypeError, ValueError):
            return None

    def save(self, answer: JsonValue) -> None:
        """Cache a result, if its JSON can be read back unchanged."""
        files = loaded_files()
        if files is None:
            return
        plain = json.loads(json.dumps(answer.to_json()))
        try:
            is_unchanged = json.loads(json.dumps(type(answer).from_json(plain).to_json())) == plain
        except ValueError:
            return
        if is_unchanged:
            self.store.save(self.key, {"said": self.said, "given": time.time(), "files": files, "answer": plain})


def find_cached_result(
    command: str, spec: TargetSpec, asked: dict[str, Any], words: Sequence[str]
) -> ResultCacheEntry | None:
    """Return the cache entry of the command line `words`; None if the cache is off, or an input cannot be checked.

    `asked` has the options of `command` that are not in `spec`.
    """
    folder = cache_folder()
    if folder is None or spec.device != "virtual" or spec.compile or spec.trust_remote_code:
        return None
    files = [*_config_digest(spec), *_length_file_digests(spec.lengths), *_length_file_digests(asked.get("lengths"))]
    if None in files:
        return None
    question = [_FORM, command, to_plain(spec), to_plain(asked), files, describe_environment()]
    text = json.dumps(question, sort_keys=True, default=str)
    return ResultCacheEntry(
        Store(folder), hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest(), shlex.join(words)
    )


def is_without_cuda() -> bool:
    """Return whether torch is a build without CUDA, by its version.py: importing torch would take a second."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    try:
        text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return _NO_CUDA.search(text) is not None


def _config_digest(spec: TargetSpec) -> list[list[str] | None]:
    """Return path and digest of the model's configuration; [None] if the model depends on other files too."""
    if spec.model_is_size or has_model(spec.model):
        return []
    path = Path(spec.model).expanduser()
    if spec.model.endswith(".py") or not path.exists():
        return [None]
    try:
        file, config = read_config_file(path)
    except MemprofError:
        return [None]
    return [None if "auto_map" in config else _digest(file)]


def _length_file_digests(text: str | None) -> list[list[str] | None]:
    """Return path and digest of each file that `--lengths` may name: a comma may be part of the file's name."""
    parts = (text or "").split(",")
    names = [",".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return [_digest(Path(name).expanduser()) for name in names if name and os.path.lexists(Path(name).expanduser())]


def _digest(file: Path) -> list[str] | None:
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST_FILE:
            return None
        return [str(file.resolve()), hashlib.sha256(file.read_bytes()).hexdigest()]
    except OSError:
        return None
