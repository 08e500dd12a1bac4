"""The registry of stubs, by the names of the functions and classes that they replace."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from memprof.errors import MemprofError, UsageError
from memprof.stubs import in_graph as compiled_graphs
from memprof.stubs.packages import ENTRY_POINT_GROUP, PACKAGES, read_public_names

_Object = TypeVar("_Object")


class Stub(NamedTuple):
    """A function or class that replaces the real one, and the source file from which its allocations were read."""

    value: Any
    source: str


_stubs_by_module: dict[str, dict[str, Stub]] = {}  # module -> name in it -> its replacement


def stub(*names: str, source: str, in_graph: bool = False) -> Callable[[_Object], _Object]:
    """Return a decorator that registers a function or class as the stub of one whose package is not installed.

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
            stubs = _stubs_by_module.setdefault(module, {})
            if attribute in stubs:
                raise UsageError("two stubs for one name", value=name, hint=f"it has one, by {stubs[attribute].source}")
            stubs[attribute] = Stub(value, source)
        if isinstance(value, type) or hasattr(value, "__code__"):
            value.__module__ = names[0].rpartition(".")[0]
        if hasattr(value, "__code__"):
            value.__name__ = names[0].rpartition(".")[2]  # type: ignore[attr-defined]
        if in_graph:
            compiled_graphs.allow_in_graph(value)
        return value

    return register


def register_in(*modules: str, source: str, in_graph: bool = False) -> Callable[[_Object], _Object]:
    """Return a decorator that registers an object as `stub` does, under its `__name__` in each of `modules`."""

    def register(value: _Object) -> _Object:
        names = (f"{module}.{value.__name__}" for module in modules)  # type: ignore[attr-defined]
        return stub(*names, source=source, in_graph=in_graph)(value)

    return register


def unregister(package: str) -> None:
    """Remove all stubs registered for `package`."""
    for module in [name for name in _stubs_by_module if _is_submodule(name, package)]:
        del _stubs_by_module[module]


def has_stubs(package: str) -> bool:
    """Load the stubs of `package`, if any; return whether it has stubs."""
    return _load_stubs(package) or any(_is_submodule(module, package) for module in _stubs_by_module)


def find_modules(package: str) -> dict[str, dict[str, Stub]]:
    """Return the stubs of `package`: module name -> name in the module -> stub."""
    _load_stubs(package)
    return {name: stubs for name, stubs in _stubs_by_module.items() if _is_submodule(name, package)}


def has_module(name: str) -> bool:
    """Return whether the real package has a module `name`, by memprof's list of its modules and by its stubs."""
    package = name.partition(".")[0]
    module_names = {*read_public_names(package), *find_modules(package)}
    return any(_is_submodule(module, name) for module in module_names)


def get_stubs(module: str) -> dict[str, Any]:
    """Return the functions and classes that are registered as stubs in `module`, by name."""
    return {name: stub.value for name, stub in find_modules(module.partition(".")[0]).get(module, {}).items()}


def has_public_names(module: str) -> bool:
    """Return whether memprof has a list of the public names of `module`'s package."""
    return bool(read_public_names(module.partition(".")[0]))


def is_public(module: str, name: str) -> bool:
    """Return whether the real module has the public name `name`; True if its names are not known."""
    return not has_public_names(module) or name in read_public_names(module.partition(".")[0]).get(module, ())


@functools.cache
def _load_stubs(package: str) -> bool:
    """Import the module that registers stubs of `package`, memprof's or an entry point's; return whether one exists."""
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
    """Return the entry points by which installed distributions register stubs; `path` is the key of the cache."""
    return importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)


def _is_submodule(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
