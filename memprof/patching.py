"""Replacing attributes of others' modules and classes, and putting every one of them back.

`PatchSet` is the one way in which memprof does so; `Extension` is the form of each group of patches.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.util
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

Patch = tuple[Any, str, Any]  # owner, name of the attribute, replacement

_MISSING = object()
# Name -> modules that were seen not to have it: thousands, and looking again at each run's ends would cost more than
# all else that is done there.
_WITHOUT: defaultdict[str, set[str]] = defaultdict(set)


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


@contextlib.contextmanager
def bound_everywhere(name: str, original: Any, replacement: Any) -> Iterator[None]:
    """Bind `name` to `replacement` inside, wherever it is `original` (`from safetensors import safe_open`).

    A module that is imported inside takes the replacement; it is given the original afterwards.
    """
    without = _WITHOUT[name]
    changed = _rebind(sys.modules.keys() - without, name, original, replacement)
    without |= sys.modules.keys() - changed
    try:
        yield
    finally:
        _rebind(changed | (sys.modules.keys() - without), name, replacement, original)


def _rebind(modules: set[str], name: str, old: Any, new: Any) -> set[str]:
    changed = set()
    for module_name in modules:
        module = sys.modules.get(module_name)
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)
            changed.add(module_name)
    return changed


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
