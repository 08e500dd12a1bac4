"""Patches that leave no trace: every attribute that a run replaces is put back, whatever happens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Patch = tuple[Any, str, Any]
"""Owner, name of the attribute, replacement."""

_MISSING = object()


class Patches:
    """Attributes replaced for the length of a run, restored in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Patch] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name` by `value`."""
        self._undo.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def set_all(self, patches: Iterable[Patch]) -> None:
        """Replace these, one after the other: each is made when those before it are in place."""
        for owner, name, value in patches:
            self.set(owner, name, value)

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            owner, name, before = self._undo.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
