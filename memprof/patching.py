"""Replacement of attributes of other packages' modules and classes, and their restoration.

`PatchSet` makes all patches of memprof; `Extension` is the form of each group of patches.
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
# Name -> modules without that name: thousands, and a new search at each run's begin and end would cost more than
# all other work there.
_MODULES_WITHOUT_NAME: defaultdict[str, set[str]] = defaultdict(set)


class ImportHook(importlib.abc.MetaPathFinder):
    """Import hook for the front of `sys.meta_path`: other finders find the modules; callbacks run after a module's
    execution."""

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callable[[ModuleType], None]]] = {}
        self._is_searching = False

    def add(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        """Call `callback` with the module `name` once the module has first been executed."""
        self._callbacks.setdefault(name, []).append(callback)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the other finders' spec, with a loader that runs the callbacks after the module's execution."""
        if name not in self._callbacks or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                for callback in self._callbacks[name]:
                    callback(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class PatchSet:
    """Context manager: replaces attributes, and restores them in reverse order on exit.

    All attributes are restored, even if the restoration of one fails.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []
        self._modules: set[str] = set()  # modules imported before the first patch
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

    def apply_all(self, patches: Iterable[Patch]) -> None:
        """Apply `patches` one after the other; a lazy iterable sees the earlier patches in place."""
        for owner, name, value in patches:
            self.set(owner, name, value)

    def apply_on_import(self, name: str, patches: Callable[[ModuleType], Iterable[Patch]]) -> None:
        """Apply the patches of the module `name`: at once if the module has been imported, else after its execution."""
        if name in sys.modules:
            self.apply_all(patches(sys.modules[name]))
            return
        if self._hook is None:
            self._hook = ImportHook()
            sys.meta_path.insert(0, self._hook)
        self._hook.add(name, lambda module: self.apply_all(patches(module)))

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Context manager: restore the originals in the body, then reinstate the current patches."""
        with contextlib.ExitStack() as restorations:  # one that cannot be put back keeps no other from it
            for owner, name, before, _ in reversed(self._undo):
                restorations.callback(_restore, owner, name, vars(owner).get(name, _MISSING))
                _restore(owner, name, before)
            yield

    def undo(self, excluded_folder: str = "") -> None:
        """Restore all originals, also in modules that were imported since the first patch and refer to a replacement,
        except modules with a file below the folder `excluded_folder`."""
        hook, self._hook = self._hook, None
        if hook in sys.meta_path:  # unless the program has removed the hook
            sys.meta_path.remove(hook)
        undo, self._undo = self._undo, []
        with contextlib.ExitStack() as restorations:  # one that cannot be put back keeps no other from it
            for owner, name, before, _ in undo:
                restorations.callback(_restore, owner, name, before)
            originals: dict[int, Any] = {}
            for _, _, before, value in undo:
                if callable(value) and before is not _MISSING and getattr(value, "__module__", None) != "builtins":
                    originals[id(value)] = originals.get(id(before), before)
            for module in [sys.modules[name] for name in sys.modules.keys() - self._modules] if originals else []:
                if not isinstance(module, ModuleType):
                    continue
                if excluded_folder and str(getattr(module, "__file__", "")).startswith(excluded_folder):
                    continue
                for name, value in list(vars(module).items()):
                    if id(value) in originals:
                        vars(module)[name] = originals[id(value)]


def _restore(owner: Any, name: str, value: Any) -> None:
    if value is not _MISSING:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


@contextlib.contextmanager
def bind_everywhere(name: str, original: Any, replacement: Any) -> Iterator[None]:
    """Context manager: bind `name` to `replacement` in each module where it is `original` (`from safetensors import
    safe_open`).

    A module that is imported in the body gets the replacement, and the original afterwards.
    """
    modules_without_name = _MODULES_WITHOUT_NAME[name]
    changed = _rebind(sys.modules.keys() - modules_without_name, name, original, replacement)
    modules_without_name |= sys.modules.keys() - changed
    try:
        yield
    finally:
        _rebind(changed | (sys.modules.keys() - modules_without_name), name, replacement, original)


def _rebind(modules: set[str], name: str, old: Any, new: Any) -> set[str]:
    changed = set()
    for module_name in modules:
        module = sys.modules.get(module_name)
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)
            changed.add(module_name)
    return changed


class Extension:
    """A group of patches and other changes for the length of a run. One instance is made for each run.

    `context` has the run's objects that extensions use (memprof/virtual/install_context.py).
    """

    imports: tuple[str, ...] = ()  # other packages' modules that the program may import
    environment: Mapping[str, str] = {}  # environment variables of the Python processes that the program starts

    def patches(self, context: Any) -> Iterator[Patch]:
        """Yield the patches (owner, name, replacement) that are in place from the begin of the run."""
        yield from ()

    def make_module_patches(self, module: ModuleType, context: Any) -> Iterator[Patch]:
        """Yield the patches that are applied once `module`, one of `imports`, has been imported."""
        yield from ()

    def around(self, context: Any) -> AbstractContextManager[object]:
        """Return a context manager that is entered for the length of the run."""
        return contextlib.nullcontext()

    def leave_in_child(self) -> None:
        """Undo, in a process forked during the run, changes other than patches and memory."""


@functools.cache
def find_extensions(*packages: str) -> tuple[type[Extension], ...]:
    """Return the extensions in the files of these packages, in the order of the files' names."""
    found: list[type[Extension]] = []
    for package in packages:
        for file in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            module = importlib.import_module(file.name)
            kinds = [value for value in vars(module).values() if isinstance(value, type)]
            found += [kind for kind in kinds if issubclass(kind, Extension) and kind.__module__ == file.name]
    return tuple(found)
