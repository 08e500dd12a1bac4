"""PatchSet that leave no trace: every attribute that a run replaces is put back, whatever happens."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

Patch = tuple[Any, str, Any]
"""Owner, name of the attribute, replacement."""

_MISSING = object()


class PatchSet:
    """Attributes replaced for the length of a run, restored in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []
        self._modules: set[str] = set()
        """Those that had been imported before anything was replaced."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name` by `value`."""
        self._modules = self._modules or set(sys.modules)
        self._undo.append((owner, name, vars(owner).get(name, _MISSING), value))
        setattr(owner, name, value)

    def set_all(self, patches: Iterable[Patch]) -> None:
        """Replace these, one after the other: each is made when those before it are in place."""
        for owner, name, value in patches:
            self.set(owner, name, value)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside, what was replaced is as it was before; afterwards as it is now."""
        with contextlib.ExitStack() as back:  # one that cannot be put back keeps no other from it
            for owner, name, before, _ in reversed(self._undo):
                back.callback(_put, owner, name, vars(owner).get(name, _MISSING))
                _put(owner, name, before)
            yield

    def undo(self, but_below: str = "") -> None:
        """Put everything back, also in modules that were imported meanwhile and took a replacement for the original.

        Args:
            but_below: modules whose file lies below this folder keep what they took; none if it is empty.
        """
        undo, self._undo = self._undo, []
        with contextlib.ExitStack() as back:  # one that cannot be put back keeps no other from it
            for owner, name, before, _ in undo:
                back.callback(_put, owner, name, before)
            originals: dict[int, Any] = {}
            for _, _, before, value in undo:
                if callable(value) and before is not _MISSING and getattr(value, "__module__", None) != "builtins":
                    originals[id(value)] = originals.get(id(before), before)
            for module in [sys.modules[name] for name in sys.modules.keys() - self._modules] if originals else []:
                if not isinstance(module, ModuleType):
                    continue
                if but_below and str(getattr(module, "__file__", "")).startswith(but_below):
                    continue
                for name, value in list(vars(module).items()):
                    if id(value) in originals:
                        vars(module)[name] = originals[id(value)]


def _put(owner: Any, name: str, value: Any) -> None:
    if value is not _MISSING:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)
