"""Monkeypatching: replacing attributes of other packages' modules and classes, and restoring them.
`PatchSet` applies and undoes patches; an `Extension` is a group of patches for a run."""

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
# Name -> modules without that name: thousands, and searching them again at each begin and end of a run would take
# longer than all other work there.
_MODULES_WITHOUT_NAME: defaultdict[str, set[str]] = defaultdict(set)


class ImportHook(importlib.abc.MetaPathFinder):
    """Finder for the front of `sys.meta_path` that leaves finding to the other finders, and calls back after a module
    has been executed."""

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callable[[ModuleType], None]]] = {}
        self._is_searching = False

    def add(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        """Have `callback` called with the module `name` once that has been executed."""
        self._callbacks.setdefault(name, []).append(callback)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of the other finders, with a loader that runs the callbacks after executing the module."""
        if name not in self._callbacks or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            original_exec = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                original_exec(module)
                for callback in self._callbacks[name]:
                    callback(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class PatchSet:
    """Set of patches: replaces attributes, and restores them in reverse order at exit of the context manager.
    If one attribute cannot be restored, the others still are."""

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
        """Apply `patches` one by one; a generator runs with its earlier patches applied."""
        for owner, name, value in patches:
            self.set(owner, name, value)

    def apply_on_import(self, name: str, patches: Callable[[ModuleType], Iterable[Patch]]) -> None:
        """Apply `patches(module)` to the module `name`: now if it is imported already, else once it is imported."""
        if name in sys.modules:
            self.apply_all(patches(sys.modules[name]))
            return
        if self._hook is None:
            self._hook = ImportHook()
            sys.meta_path.insert(0, self._hook)
        self._hook.add(name, lambda module: self.apply_all(patches(module)))

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Context manager: restore the original attributes in the body, and apply the patches again at exit."""
        with contextlib.ExitStack() as restorations:  # one that cannot be put back keeps no other from it
            for owner, name, original, _ in reversed(self._undo):
                restorations.callback(_restore, owner, name, vars(owner).get(name, _MISSING))
                _restore(owner, name, original)
            yield

    def undo(self, excluded_folder: str = "") -> None:
        """Restore all original attributes, also in modules that have imported a replacement since the first patch,
        except modules whose file is in `excluded_folder`."""
        hook, self._hook = self._hook, None
        if hook in sys.meta_path:  # unless the program has removed the hook
            sys.meta_path.remove(hook)
        patches, self._undo = self._undo, []
        with contextlib.ExitStack() as restorations:  # one that cannot be put back keeps no other from it
            for owner, name, original, _ in patches:
                restorations.callback(_restore, owner, name, original)
            originals: dict[int, Any] = {}
            for _, _, original, value in patches:
                if callable(value) and original is not _MISSING and getattr(value, "__module__", None) != "builtins":
                    originals[id(value)] = originals.get(id(original), original)
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
    """Context manager: replace `original` by `replacement` in all modules that have it as `name`, as after `from
    safetensors import safe_open`.

    At exit the original is restored, also in modules that were imported in the body.
    """
    modules_without_name = _MODULES_WITHOUT_NAME[name]
    rebound = _rebind(sys.modules.keys() - modules_without_name, name, original, replacement)
    modules_without_name |= sys.modules.keys() - rebound
    try:
        yield
    finally:
        _rebind(rebound | (sys.modules.keys() - modules_without_name), name, replacement, original)


def _rebind(modules: set[str], name: str, old_value: Any, new_value: Any) -> set[str]:
    rebound = set()
    for module_name in modules:
        module = sys.modules.get(module_name)
        if getattr(module, "__dict__", {}).get(name) is old_value:
            setattr(module, name, new_value)
            rebound.add(module_name)
    return rebound


class Extension:
    """Group of patches and other changes during a run; each run creates its own instance.
    `context` has the run's objects that extensions use (memprof/virtual/install_context.py)."""

    imports: tuple[str, ...] = ()  # other packages' modules that the program may import
    environment: Mapping[str, str] = {}  # environment variables of the Python processes that the program starts

    def patches(self, context: Any) -> Iterator[Patch]:
        """Yield patches (owner, name, replacement) to apply at the begin of the run."""
        yield from ()

    def make_module_patches(self, module: ModuleType, context: Any) -> Iterator[Patch]:
        """Yield patches (owner, name, replacement) to apply once `module`, one of `imports`, is imported."""
        yield from ()

    def around(self, context: Any) -> AbstractContextManager[object]:
        """Return a context manager that is entered at the begin of the run and exited at its end."""
        return contextlib.nullcontext()

    def leave_in_child(self) -> None:
        """Undo changes that are neither patches nor memory, in a child process that was forked during the run."""


@functools.cache
def find_extensions(*packages: str) -> tuple[type[Extension], ...]:
    """Return the subclasses of `Extension` in the modules of `packages`, sorted by module name."""
    extensions: list[type[Extension]] = []
    for package in packages:
        for file in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            module = importlib.import_module(file.name)
            classes = [cls for cls in vars(module).values() if isinstance(cls, type)]
            extensions += [cls for cls in classes if issubclass(cls, Extension) and cls.__module__ == file.name]
    return tuple(extensions)
