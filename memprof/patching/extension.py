"""`Extension`: a part of what is put in place on entering the virtual GPU. Each is a class in a file of its own."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from memprof.patching.patch_set import Patch


class Extension:
    """A part of what is put in place for a run, and taken away after it. One is made for each run.

    `context` is what all of them are given of the run (memprof/virtual/install_context.py).
    """

    imports: tuple[str, ...] = ()  # modules of others that the program may import
    environment: Mapping[str, str] = {}  # variables that Pythons find which the program starts

    def patches(self, context: Any) -> Iterator[Patch]:
        """Give the patches (owner, name, replacement) that are in place from the beginning of the run on."""
        yield from ()

    def patches_of(self, module: ModuleType, context: Any) -> Iterator[Patch]:
        """Give those that are set once `module`, one of `imports`, has been imported."""
        yield from ()

    def around(self, context: Any) -> AbstractContextManager[object]:
        """Return what is entered for the length of the run."""
        return contextlib.nullcontext()

    def leave_in_child(self) -> None:
        """Take back, in a process that was forked in the run, what is neither a patch nor in memory alone."""


@functools.cache
def extensions_in(*packages: str) -> tuple[type[Extension], ...]:
    """Return the extensions in the files of these packages, in the order of the files' names."""
    found: list[type[Extension]] = []
    for package in packages:
        for file in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            module = importlib.import_module(file.name)
            kinds = [value for value in vars(module).values() if isinstance(value, type)]
            found += [kind for kind in kinds if issubclass(kind, Extension) and kind.__module__ == file.name]
    return tuple(found)
