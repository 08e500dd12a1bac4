"""`PatchSet`: the one way in which memprof replaces an attribute of a module or class that is not its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from memprof.patching.import_hook import ImportHook

Patch = tuple[Any, str, Any]  # owner, name of the attribute, replacement

_MISSING = object()


class PatchSet:
    """A context manager: attributes that are replaced inside, and put back, in reverse order, when it is left.

    Every one of them is put back, also if another cannot be.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []
        self._modules: set[str] = set()  # those that had been imported before anything was replaced
        self._hook: ImportHook | None = None

    def __enter__(self) -> PatchSet:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name` by `value`."""
        self._modules = self._modules or set(sys.modules)
        self._undo.append((owner, name, vars(owner).get(name, _MISSING), value))
        setattr(owner, name, value)

    def set_all(self, patches: Iterable[Patch]) -> None:
        """Replace these, one after the other: each is made when those before it are in place."""
        for owner, name, value in patches:
            self.set(owner, name, value)

    def on_import(self, name: str, patches: Callable[[ModuleType], Iterable[Patch]]) -> None:
        """Set `patches` of the module `name`: at once if it has been imported, else as soon as it has run."""
        if name in sys.modules:
            self.set_all(patches(sys.modules[name]))
            return
        if self._hook is None:
            self._hook = ImportHook()
            sys.meta_path.insert(0, self._hook)
        self._hook.add(name, lambda module: self.set_all(patches(module)))

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Restore inside what was replaced; afterwards all is as it is now."""
        with contextlib.ExitStack() as back:  # one that cannot be put back keeps no other from it
            for owner, name, before, _ in reversed(self._undo):
                back.callback(_put, owner, name, vars(owner).get(name, _MISSING))
                _put(owner, name, before)
            yield

    def undo(self, but_below: str = "") -> None:
        """Put everything back, also in modules that were imported meanwhile and took a replacement for the original;
        those whose file lies below the folder `but_below` keep what they took."""
        hook, self._hook = self._hook, None
        if hook in sys.meta_path:  # unless the program took it out
            sys.meta_path.remove(hook)
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
