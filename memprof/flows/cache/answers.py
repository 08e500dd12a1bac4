"""Answers that were given before: only to questions whose answer depends on nothing but what can be looked at again.

Those are simulated runs of the catalog's models, of sizes and of local configurations. Code of the user's, of the hub
and of compilers may read anything, so that it is run each time.
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
from memprof.flows.cache.inputs import describe_environment, loaded_files, unchanged
from memprof.flows.cache.store import Store, cache_folder
from memprof.spec import TargetSpec
from memprof.trace.json_values import JsonValue, to_plain
from memprof.workload.catalog import has_model, read_config_file

_FORM = 1  # of what is cached
_LARGEST_FILE = 16 << 20  # bytes of a file that is read to see whether it is the same
_NO_CUDA = re.compile(r"^cuda\b[^=]*=\s*None\s*$", re.MULTILINE)

_Answer = TypeVar("_Answer", bound=JsonValue)


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """The answer to one question, in the cache."""

    store: Store
    key: str
    said: str  # the question, for people

    def find(self, kind: type[_Answer]) -> tuple[_Answer, float] | None:
        """Return the answer, and how many seconds ago it was given; None if there is none, or something has changed."""
        entry = self.store.find(self.key)
        if entry is None or not isinstance(entry.get("files"), list) or not unchanged(entry["files"]):
            return None
        try:
            return kind.from_json(entry["answer"]), max(time.time() - float(entry["given"]), 0.0)
        except (KeyError, TypeError, ValueError):
            return None

    def keep(self, answer: JsonValue) -> None:
        """Keep an answer, if it comes back as it is."""
        files = loaded_files()
        if files is None:
            return
        plain = json.loads(json.dumps(answer.to_json()))
        try:
            same = json.loads(json.dumps(type(answer).from_json(plain).to_json())) == plain
        except ValueError:
            return
        if same:
            self.store.keep(self.key, {"said": self.said, "given": time.time(), "files": files, "answer": plain})


def cached_answer(command: str, spec: TargetSpec, asked: dict[str, Any], words: Sequence[str]) -> CachedAnswer | None:
    """Return where an answer to `words` is kept; None if it may depend on what cannot be looked at, or is not to be
    kept.

    `asked` is what else the answer of `command` depends on.
    """
    folder = cache_folder()
    if folder is None or spec.device != "virtual" or spec.compile or spec.trust_remote_code:
        return None
    files = [*_configuration(spec), *_lengths(spec.lengths), *_lengths(asked.get("lengths"))]
    if None in files:
        return None
    question = [_FORM, command, to_plain(spec), to_plain(asked), files, describe_environment()]
    text = json.dumps(question, sort_keys=True, default=str)
    return CachedAnswer(
        Store(folder), hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest(), shlex.join(words)
    )


def is_without_cuda() -> bool:
    """Say whether the installed torch has no CUDA, told by a file of it: importing it takes a second."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    try:
        text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return _NO_CUDA.search(text) is not None


def _configuration(spec: TargetSpec) -> list[list[str] | None]:
    """Return the file that the model is read from, and its digest; None in it if that is not all of it."""
    if spec.model_is_size or has_model(spec.model):
        return []
    path = Path(spec.model).expanduser()
    if spec.model.endswith(".py") or not path.exists():
        return [None]
    try:
        file, config = read_config_file(path)
    except MemprofError:
        return [None]
    return [None if "auto_map" in config else _read_lines(file)]


def _lengths(text: str | None) -> list[list[str] | None]:
    """Return files that `--lengths` may name: options stand behind a comma, which a file's name may have too."""
    parts = (text or "").split(",")
    names = [",".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return [_read_lines(Path(name).expanduser()) for name in names if name and os.path.lexists(Path(name).expanduser())]


def _read_lines(file: Path) -> list[str] | None:
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST_FILE:
            return None
        return [str(file.resolve()), hashlib.sha256(file.read_bytes()).hexdigest()]
    except OSError:
        return None
