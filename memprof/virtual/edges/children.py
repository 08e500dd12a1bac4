"""Processes that the program starts anew: each Python among them is told that it has no card, and tells what it did.

The probe (memprof/probe) reaches them by the environment that they inherit, or are given. A program that puts another
in its own place is stopped there: nothing of it would be left to report on.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from memprof import probe
from memprof.probe.sitecustomize import REFUSALS
from memprof.virtual.limits import not_yet
from memprof.watch.patches import Patch

_ENVIRONMENT_AT = {"posix_spawn": 2, "posix_spawnp": 2, "spawnve": 3, "spawnvpe": 3}
"""Functions of `os` that are given an environment, and as which of their arguments."""


class Children:
    """A context manager: the processes that are started inside."""

    def __init__(self) -> None:
        self.file = ""
        """Where they tell what they were refused."""
        self._process = 0

    def __enter__(self) -> Children:
        opened, self.file = tempfile.mkstemp(prefix="memprof-refusals-")
        os.close(opened)
        self._process = os.getpid()
        os.environ.update(self._told(os.environ))
        return self

    def __exit__(self, *error: object) -> None:
        if os.getpid() == self._process:  # a forked child leaves the same blocks
            os.unlink(self.file)
        os.environ.pop(REFUSALS, None)
        path = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder != probe.FOLDER]
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
        if path in ([], [""]):
            del os.environ["PYTHONPATH"]

    def refused(self) -> list[tuple[str, str | None]]:
        """What they were refused so far: the problem, and what to do instead."""
        with open(self.file, encoding="utf-8") as lines:
            return [(problem, hint) for problem, hint in map(json.loads, lines)]

    def patches(self) -> Iterator[Patch]:
        """The patches (owner, name, replacement) of what starts them with an environment of their own."""
        popen = subprocess.Popen.__init__

        def __init__(started: Any, *args: Any, **options: Any) -> None:
            if options.get("env") is not None:
                options["env"] = self._told(options["env"])
            popen(started, *args, **options)

        yield subprocess.Popen, "__init__", __init__
        for name, at in _ENVIRONMENT_AT.items():
            yield os, name, self._starting(getattr(os, name), at)
        for name in ("execv", "execve"):  # all others call these
            yield os, name, _replacing(getattr(os, name))

    def _starting(self, original: Callable[..., Any], at: int) -> Callable[..., Any]:
        def start(*args: Any, **options: Any) -> Any:
            if len(args) <= at:
                return original(*args, **options)
            return original(*args[:at], self._told(args[at]), *args[at + 1 :], **options)

        return start

    def _told(self, environment: Mapping[Any, Any]) -> dict[str, str]:
        """An environment in which a Python finds the probe."""
        told = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()} | {REFUSALS: self.file}
        path = told.get("PYTHONPATH")
        if path is None or probe.FOLDER not in path.split(os.pathsep):
            told["PYTHONPATH"] = probe.python_path(path)
        return told


def _replacing(original: Callable[..., Any]) -> Callable[..., Any]:
    process = os.getpid()

    def replace(path: Any, *args: Any) -> Any:
        if os.getpid() != process:  # as in os.spawnv
            return original(path, *args)
        raise not_yet(f"puts {os.fsdecode(path)} in its own place (os.exec)", "give memprof run that program itself")

    return replace
