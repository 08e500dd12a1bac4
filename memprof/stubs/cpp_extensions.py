"""CUDA code that a program compiles itself, by torch.utils.cpp_extension, where no compiler and no GPU exist.

`load` and `load_inline` return the bindings in the sources: functions of a Python module (pybind11), and operators in
`torch.ops` (TORCH_LIBRARY). A function that returns nothing can only have written into its arguments, and is skipped,
as a Triton kernel is. The memory of a function that returns something is unknown: `memprof.stub` can define it under
its name, else its call ends the run. Extensions without CUDA code are built and run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from memprof.patching import Patch
from memprof.stubs import registry
from memprof.virtual.install_context import InstallContext
from memprof.virtual.limits import unsupported_error
from memprof.virtual.operator_call import find_tensors

SKIPPED_FUNCTIONS = (
    "Functions of {}, CUDA code that the program compiles, are not run: what they write is unknown, and what their C++ "
    "code allocates is not counted."
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LITERAL_BOUNDARY = re.compile(r'"\s*\n\s*"')  # between two string literals that C++ concatenates
_BINDINGS = re.compile(r"\b(PYBIND11_MODULE|TORCH_LIBRARY|TORCH_LIBRARY_FRAGMENT)\s*\(\s*(\w+)\s*,\s*(\w+)\s*\)\s*\{")
_KEYWORDS = frozenset({"return", "else", "new", "throw", "case", "goto", "co_return", "typename"})


class Binding(NamedTuple):
    """A function that an extension's C++ sources bind, by pybind11 or TORCH_LIBRARY."""

    library: str | None  # namespace of torch.ops; None: the Python module
    name: str
    is_void: bool  # whether it returns nothing, according to the sources


def find_bindings(name: str, source: str, functions: Sequence[str] = ()) -> Iterator[Binding]:
    """Yield the bindings in the C++ `source` of the extension `name`, and of `functions`, which load_inline binds."""
    source = _LITERAL_BOUNDARY.sub("", _COMMENT.sub("", source))
    for function in functions:
        yield Binding(None, function, _is_void(function, source))
    for block in _BINDINGS.finditer(source):
        macro, namespace, variable = block.groups()
        library = None if macro == "PYBIND11_MODULE" else name if namespace == "TORCH_EXTENSION_NAME" else namespace
        definition_pattern = rf'\b{variable}\s*\.\s*def\s*\(\s*"([^"]+)"\s*(?:,\s*(?:TORCH_FN\s*\(\s*)?&?\s*([\w:]+))?'
        for definition in re.finditer(definition_pattern, source[block.end() : _find_block_end(source, block.end())]):
            schema, _, return_type = definition[1].partition("->")
            function = schema.partition("(")[0].strip()
            cpp_function = (definition[2] or "").rpartition("::")[2]
            is_void = return_type.strip() == "()" if return_type else _is_void(cpp_function, source)
            yield Binding(library, function.rpartition("::")[2], is_void)


def _find_block_end(source: str, begin: int) -> int:
    """Return the index of the brace that closes the block whose body begins at `begin`."""
    depth = 1
    for index in range(begin, len(source)):
        depth += {"{": 1, "}": -1}.get(source[index], 0)
        if not depth:
            return index
    return len(source)


def _is_void(function: str, source: str) -> bool:
    """Return whether all declarations of a C++ function in `source` return void; False without a declaration."""
    return_types = re.findall(rf"([\w:]+)(?:<[^;{{}}()]*>)?(?:\s*[&*]+\s*|\s+){function}\s*\(", source)
    return bool(function) and set(return_types) - _KEYWORDS == {"void"}


class _Extension(ModuleType):
    """The Python module of an extension; functions that its sources do not bind raise an error when called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _make_refused_function(f"{self.__name__}.{name}")


def get_patches(module: Any, context: InstallContext) -> Iterator[Patch]:
    """Yield patches of `load` and `load_inline` in `module`, torch.utils.cpp_extension, if kernels may be skipped."""
    if not context.options.skips_kernels:
        return
    original_load, original_load_inline = module.load, module.load_inline

    def load(name: str, sources: str | Sequence[str], *args: Any, **options: Any) -> Any:
        paths = [Path(source) for source in _as_list(sources)]
        if not (options.get("with_cuda") or any(path.suffix in (".cu", ".cuh") for path in paths)):
            return original_load(name, sources, *args, **options)
        return make_extension(name, [path.read_text(encoding="utf-8", errors="replace") for path in paths], (), options)

    def load_inline(
        name: str, cpp_sources: Any, cuda_sources: Any = None, functions: Any = None, *args: Any, **options: Any
    ) -> Any:
        if not (options.get("with_cuda") or cuda_sources):
            return original_load_inline(name, cpp_sources, cuda_sources, functions, *args, **options)
        sources = [*_as_list(cpp_sources), *_as_list(cuda_sources)]
        return make_extension(name, sources, _as_list(functions), options)

    yield module, "load", load
    yield module, "load_inline", load_inline

    def make_extension(name: str, sources: Sequence[str], functions: Sequence[str], options: dict[str, Any]) -> Any:
        extension = _Extension(name)
        for library, function, is_void in find_bindings(name, "\n".join(sources), functions):
            full_name = f"{library or name}.{function}"
            stub = registry.get_stubs(library or name).get(function)
            replacement = stub or (make_skipped_function(full_name) if is_void else _make_refused_function(full_name))
            if library is None:
                setattr(extension, function, replacement)
            else:
                context.run_patches.set(getattr(torch.ops, library), function, replacement)
        return extension if options.get("is_python_module", True) else None

    def make_skipped_function(full_name: str) -> Callable[..., None]:
        def function(*args: Any, **kwargs: Any) -> None:
            context.assume(SKIPPED_FUNCTIONS.format(full_name.rpartition(".")[0]))
            for tensor in find_tensors([*args, *kwargs.values()]):
                context.forget_values(tensor)

        return function


def _as_list(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def _make_refused_function(full_name: str) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise unsupported_error(
            f"calls {full_name}, CUDA code that the program compiles, of whose results nothing is known",
            hint=f'say what it allocates: @memprof.stub("{full_name}", source="its C++ file") above a function that '
            "returns tensors of the shapes, types and strides that the real one returns",
        )

    return function
