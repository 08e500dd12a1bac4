"""The question of one cell of a sweep: a spec or a script's run, and the fixes. Small JSON for any worker."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memprof.command_line import make_profile_command, make_run_command
from memprof.flows.cache.inputs import hash_memprof_code
from memprof.run_spec import RunSpec
from memprof.spec import TargetSpec
from memprof.trace.json_values import JsonValue
from memprof.version import __version__

NO_FIX, SEARCH = "none", "auto"
_FORMAT_VERSION = 1  # of a question and its answer
# Packages that an answer depends on.
_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "torchao")

Versions = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(JsonValue):
    """The question of one cell: `memprof profile` with `spec`, or `memprof run` with `run` and `program`."""

    fix: str = NO_FIX  # none, auto, or names as for --fix
    spec: TargetSpec | None = None
    run: RunSpec | None = None
    program: tuple[str, ...] = ()  # the script and its arguments; begins with -m for a module
    folder: str = ""  # in which the script runs
    code: str = ""  # digest of the script, or of the file that the model is in

    @property
    def command(self) -> str:
        """Return the command that answers the cell alone."""
        words = () if self.fix == NO_FIX else ("--fix", self.fix)
        if self.run is not None:
            return make_run_command(self.run, self.program, *words)
        assert self.spec is not None
        return make_profile_command(self.spec, *words)

    def make_key(self, versions: Versions) -> str:
        """Return the key under which the answer is stored: 64 hexadecimal digits."""
        text = json.dumps([_FORMAT_VERSION, self.to_json(), dict(versions)], sort_keys=True)
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def read_versions() -> dict[str, str]:
    """Return the versions of memprof (with a digest of its code) and of the packages that an answer depends on."""
    versions = {"memprof": f"{__version__} ({hash_memprof_code()[:12]})"}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def hash_code(name: str) -> str:
    """Return a digest of the file that `name` (a script, config.json, folder of one, or file.py:factory) is in; "" if
    it is none. What this file imports is not part of it."""
    path = Path(name if Path(name).exists() else name.rpartition(":")[0] or name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    except OSError:
        return ""


def describe_differences(own: Versions, others: Versions) -> str:
    """Return such as "torch 2.11.0, here 2.13.0", of what differs; "" if nothing does."""
    names = [name for name in {**own, **others} if own.get(name) != others.get(name)]
    return ", ".join(f"{name} {others.get(name, 'unknown')}, here {own.get(name, 'unknown')}" for name in names)


def to_payload(question: Question) -> dict[str, Any]:
    """Return a question as plain JSON, without what has its default: it is sent for each cell."""
    values: dict[str, Any] = json.loads(json.dumps(question.to_json()))
    return {name: value for name, value in values.items() if value not in (None, "", [])}
