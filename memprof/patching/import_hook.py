"""Hooks that follow the first import of a module."""

from __future__ import annotations

import importlib.abc
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any


class ImportHook(importlib.abc.MetaPathFinder):
    """A finder for the front of `sys.meta_path`: modules are found by the others, and followed by what was added."""

    def __init__(self) -> None:
        self._then: dict[str, list[Callable[[ModuleType], None]]] = {}
        self._looking = False

    def add(self, name: str, then: Callable[[ModuleType], None]) -> None:
        """Call `then` with the module `name` once it has run for the first time."""
        self._then.setdefault(name, []).append(then)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec that the other finders give, whose module calls the hook once it has run."""
        if name not in self._then or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                for then in self._then[name]:
                    then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
