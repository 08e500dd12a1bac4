"""Compiled modules of an engine, which cannot be loaded without CUDA: an import defines the operators of the schemas.

A module's operators are defined for the lifetime of the process, in each of the module's namespaces: its file keeps
schemas and namespaces apart. vLLM registers the shapes of most results itself; the others have functions here (`meta`,
`query`). Operators that return nothing but arguments that they write into need none (virtual/in_place.py). What kernels
allocate beside is in operators.py, attention.py and quantization.py, by the registry of virtual/kernels/.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, TypeVar

import torch

from memprof.stubs import tools
from memprof.stubs.vllm.schemas import read_schemas
from memprof.virtual.kernels import registry

# Namespaces of the operators in a module's file; for other modules, the module's own name (csrc/libtorch_stable/
# torch_bindings.cpp; older releases: csrc/torch_bindings.cpp).
_MAIN_NAMESPACES = ("_C", "_C_cache_ops", "_C_cuda_utils", "_C_custom_ar")
_NAMESPACES = {
    "_C_stable_libtorch": _MAIN_NAMESPACES,
    "_C": _MAIN_NAMESPACES,
    "_moe_C_stable_libtorch": ("_moe_C",),
    "common_ops": ("sgl_kernel",),
    "flash_ops": ("sgl_kernel",),
    "flashmla_ops": ("sgl_kernel",),
}
# A module that its importer does without: it needs the CUDA runtime. sleep.py has what its allocator does.
_ABSENT = ".cumem_allocator"
_Function = TypeVar("_Function", bound=Callable[..., Any])
_functions: dict[str, tuple[str, Callable[..., Any]]] = {}  # "namespace.operator" -> dispatch key, function


def meta(*operators: str) -> Callable[[_Function], _Function]:
    """Return a decorator that registers a function as the meta kernel of `operators` ("namespace.operator"): it returns
    tensors with the shapes, strides and dtypes of the results, for which vLLM has no fake of its own."""
    return _make_decorator(operators, "Meta")


def query(*operators: str) -> Callable[[_Function], _Function]:
    """Return a decorator that registers a function as `operators`, which take no tensor and answer about the GPU."""
    return _make_decorator(operators, "CompositeExplicitAutograd")


def _make_decorator(operators: tuple[str, ...], dispatch_key: str) -> Callable[[_Function], _Function]:
    def register(function: _Function) -> _Function:
        _functions.update(dict.fromkeys(operators, (dispatch_key, function)))
        return function

    return register


class BinaryFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder of the compiled modules of `package`, for the front of `sys.meta_path`.

    Args:
        on_define: called when the first operators are defined.
    """

    def __init__(self, package: str, on_define: Callable[[], None]) -> None:
        self._prefix = f"{package}."
        self._on_define = on_define

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a compiled module of the package, None for all other modules."""
        if not name.startswith(self._prefix):
            return None
        if name.endswith(_ABSENT):
            raise ModuleNotFoundError(f"{name} needs CUDA", name=name)
        spec = PathFinder.find_spec(name, path)
        if spec is None or not isinstance(spec.loader, ExtensionFileLoader):
            return None
        return ModuleSpec(name, self, origin=spec.origin)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the real module if it has no operators and can be loaded; else None, for an empty module."""
        assert spec.origin is not None
        if not read_schemas(spec.origin):
            try:
                return ExtensionFileLoader(spec.name, spec.origin).create_module(spec)
            except ImportError:
                pass
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Define the operators of `module`; its own functions raise an error when they are called."""
        origin = str(module.__spec__ and module.__spec__.origin)
        if hasattr(module, "__file__"):
            ExtensionFileLoader(module.__name__, origin).exec_module(module)
            return
        if define_module(module.__name__, origin):
            self._on_define()

        def __getattr__(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return tools.make_placeholder(module.__name__, name)

        module.__getattr__ = __getattr__  # type: ignore[method-assign]


def define_module(name: str, path: str) -> bool:
    """Define the operators of the compiled module `name`, whose file is `path`; return whether it has any."""
    schemas = tuple(read_schemas(path))
    short_name = name.rpartition(".")[2]
    for namespace in _NAMESPACES.get(short_name, (short_name,)) if schemas else ():
        _define_operators(namespace, schemas)
    return bool(schemas)


@functools.cache
def _define_operators(namespace: str, schemas: tuple[str, ...]) -> torch.library.Library:
    """Define operators in `torch.ops.<namespace>`; return their library, which keeps them for the lifetime of the
    process."""
    library = torch.library.Library(namespace, "FRAGMENT")
    for schema in schemas:
        library.define(schema)
        name = schema.partition("(")[0]
        if f"{namespace}.{name}" in _functions:
            dispatch_key, function = _functions[f"{namespace}.{name}"]
            library.impl(name, function, dispatch_key)
    registry.register_library_operators(namespace)
    return library
