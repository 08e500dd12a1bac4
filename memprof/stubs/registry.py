"""The registry of stubs: names of functions and classes that cannot be imported here, and their replacements."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from memprof.errors import MemprofError, UsageError
from memprof.stubs import in_graph as compiled_graphs
from memprof.stubs.packages import ENTRY_POINT_GROUP, PACKAGES, public_names

_Object = TypeVar("_Object")


class Stub(NamedTuple):
    """The function or class that replaces a name, and the source of its allocations."""

    value: Any
    source: str


_modules: dict[str, dict[str, Stub]] = {}  # module -> name in it -> its replacement


def stub(*names: str, source: str, in_graph: bool = False) -> Callable[[_Object], _Object]:
    """Return a decorator that registers a function or a class in place of one that cannot be imported here.

    While a program runs on a virtual GPU, `import package` finds the registered object, if the real package is not
    installed. The function is ordinary PyTorch: it returns tensors as the real one does, made by `torch.empty` and
    the like, and its temporary tensors are counted too. `memprof.kernel` adds a backward.

    Args:
        names: "package.module.name": all names of the real object.
        source: the file that shows what the real object allocates, as "repository@tag:file".
        in_graph: the real function is an operator that torch.compile keeps in a graph, and the decorated function
            writes into no argument. Otherwise a graph ends before the call.

    Raises:
        UsageError: a name is taken, or has no module.

    Example:
        @memprof.stub("my_extension.scores", source="me/my_extension@v1:scores.cu")
        def scores(query, key):
            squares = torch.empty_like(query, dtype=torch.float32)  # the real one's scratch: gone on return
            return query.new_empty(query.shape[0], key.shape[0])

        with memprof.virtual_gpu() as gpu:
            import my_extension

            rows = torch.zeros(64, 32, device="cuda")
            print(my_extension.scores(rows, rows).shape)
    """
    if not source:
        raise UsageError("a stub has a source", value=names, hint='say where it was read: source="repository@tag:file"')

    def register(value: _Object) -> _Object:
        for name in names:
            module, _, attribute = name.rpartition(".")
            if not module or not attribute.isidentifier():
                raise UsageError("a stub is for a name in a module", value=name, hint='as "package.module.name"')
            stubs = _modules.setdefault(module, {})
            if attribute in stubs:
                raise UsageError("two stubs for one name", value=name, hint=f"it has one, by {stubs[attribute].source}")
            stubs[attribute] = Stub(value, source)
        if isinstance(value, type) or hasattr(value, "__code__"):
            value.__module__ = names[0].rpartition(".")[0]
        if hasattr(value, "__code__"):
            value.__name__ = names[0].rpartition(".")[2]  # type: ignore[attr-defined]
        if in_graph:
            compiled_graphs.allow(value)
        return value

    return register


def register_in(*modules: str, source: str, in_graph: bool = False) -> Callable[[_Object], _Object]:
    """Return a decorator that registers an object, by its own name, in each of `modules`, as `stub` does."""

    def register(value: _Object) -> _Object:
        names = (f"{module}.{value.__name__}" for module in modules)  # type: ignore[attr-defined]
        return stub(*names, source=source, in_graph=in_graph)(value)

    return register


def unregister(package: str) -> None:
    """Remove all stubs registered for `package`."""
    for module in [name for name in _modules if _is_in(name, package)]:
        del _modules[module]


def has_stubs(package: str) -> bool:
    """Return whether a package has stubs, after loading them."""
    return _load(package) or any(_is_in(module, package) for module in _modules)


def modules(package: str) -> dict[str, dict[str, Stub]]:
    """Return the modules of a package that have stubs, by name, with their stubs."""
    _load(package)
    return {name: stubs for name, stubs in _modules.items() if _is_in(name, package)}


def has_module(name: str) -> bool:
    """Return whether the real package has the module `name`, as far as its modules are listed."""
    package = name.partition(".")[0]
    known = {*public_names(package), *modules(package)}
    return any(_is_in(module, name) for module in known)


def stubs_in(module: str) -> dict[str, Any]:
    """Return the functions and classes that replace the names of a module."""
    return {name: stub.value for name, stub in modules(module.partition(".")[0]).get(module, {}).items()}


def is_listed(module: str) -> bool:
    """Return whether the names of the real module are listed."""
    return bool(public_names(module.partition(".")[0]))


def is_public(module: str, name: str) -> bool:
    """Return whether the real module has, or may have, the public name `name`."""
    return not is_listed(module) or name in public_names(module.partition(".")[0]).get(module, ())


@functools.cache
def _load(package: str) -> bool:
    """Import the module that registers a package's stubs: memprof's own, or another installed package's."""
    if package in PACKAGES:
        importlib.import_module(f"memprof.stubs.{PACKAGES[package].stub_module or package}")
        return True
    for entry in _find_entry_points(*sys.path):
        if entry.name == package:
            try:
                entry.load()
            except Exception as error:
                raise MemprofError(
                    f"the stubs for {package} cannot be loaded",
                    value=f"{entry.value}: {error}",
                    hint=f"they are an entry point ({ENTRY_POINT_GROUP}) of an installed package",
                ) from error
            return True
    return False


@functools.cache
def _find_entry_points(*path: str) -> importlib.metadata.EntryPoints:
    """Return the entry points for stubs in installed distributions; reads a file of each distribution."""
    return importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
