"""Modules that a program imports while it is watched: what is to be replaced in them is, as soon as they ran."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def watch_imports(then: Mapping[str, Callable[[], None]]) -> Iterator[None]:
    """Inside, a module that is imported for the first time is followed by what `then` has for its name.

    For one that has been imported before, that is done at once.
    """
    for name, act in then.items():
        if name in sys.modules:
            act()
    finder = _Finder(then)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, then: Mapping[str, Callable[[], None]]) -> None:
        self._then = then
        self._looking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """That of the other finders; running the module ends with what is to follow."""
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
                self._then[name]()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
